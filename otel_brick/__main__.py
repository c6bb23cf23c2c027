"""`python -m otel_brick`: the same as the `otel-brick` command."""

from .cli import main

main()
