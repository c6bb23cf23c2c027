"""What the instrumentors need to be installed: nothing. Each looks for its framework when that is imported."""

from __future__ import annotations

from typing import Final

_instruments: Final[tuple[str, ...]] = ()
_supports_metrics: Final = False
_semconv_status: Final = "development"
