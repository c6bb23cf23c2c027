"""The servers of the stack, each with its file of `collector-config` unchanged: only addresses and limits are ours."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.stack.processes import Binaries, Server, free_address
from tests.stack.queries import Jaeger, Prometheus

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "collector-config"
SINK = Path(__file__).with_name("sink.yaml")


class Collector(Server):
    """A collector with its addresses.

    Args:
        configs: files, of which later ones add to earlier ones.
        variables: of the files, in addition to the addresses.
    """

    program = "collector"
    health_path = "/"

    def __init__(
        self,
        binaries: Binaries,
        name: str,
        folder: Path,
        configs: Sequence[Path],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.addresses = {
            variable: free_address()
            for variable in (
                "OTLP_GRPC_LISTEN",
                "OTLP_HTTP_LISTEN",
                "HEALTH_LISTEN",
                "PROMETHEUS_LISTEN",
                "QUERY_HTTP_LISTEN",
                "QUERY_GRPC_LISTEN",
            )
        }
        self.telemetry_address = free_address()
        host, _, port = self.telemetry_address.partition(":")
        super().__init__(
            name,
            [binaries[self.program], *(f"--config={path}" for path in configs)],
            health_url=f"http://{self.addresses['HEALTH_LISTEN']}{self.health_path}",
            folder=folder,
            environ={**self.addresses, "TELEMETRY_HOST": host, "TELEMETRY_PORT": port, **(variables or {})},
        )

    @property
    def http(self) -> str:
        """The base URL for OTLP over HTTP."""
        return f"http://{self.addresses['OTLP_HTTP_LISTEN']}"

    @property
    def grpc(self) -> str:
        """The URL for OTLP over gRPC."""
        return f"http://{self.addresses['OTLP_GRPC_LISTEN']}"

    @property
    def grpc_address(self) -> str:
        """The address for OTLP over gRPC, as other collectors want it."""
        return self.addresses["OTLP_GRPC_LISTEN"]

    @property
    def prometheus_page(self) -> str:
        """The address of the page for Prometheus."""
        return self.addresses["PROMETHEUS_LISTEN"]

    def endpoint(self, protocol: str) -> str:
        """Where a program sends to."""
        return self.grpc if protocol == "grpc" else self.http


class JaegerServer(Collector):
    """Jaeger 2, which is a collector too."""

    program = "jaeger"
    health_path = "/status"

    @property
    def query(self) -> Jaeger:
        """Its query API."""
        return Jaeger(f"http://{self.addresses['QUERY_HTTP_LISTEN']}")


class Sink(Collector):
    """A collector that writes all that it gets into files, in place of a backend that is not at hand."""

    def __init__(self, binaries: Binaries, name: str, folder: Path) -> None:
        self.traces_path = folder / f"{name}-traces.jsonl"
        self.metrics_path = folder / f"{name}-metrics.jsonl"
        files = {"TRACES_FILE": str(self.traces_path), "METRICS_FILE": str(self.metrics_path)}
        super().__init__(binaries, name, folder, [SINK], files)


class PrometheusServer(Server):
    """Prometheus in a folder of its own, which has the rules too. Whom it scrapes can change while it runs."""

    def __init__(self, binaries: Binaries, name: str, folder: Path, address: str | None = None) -> None:
        self._config = folder / name
        self._config.mkdir()
        self.data = self._config / "data"
        shutil.copy(CONFIGS / "prometheus.yml", self._config)
        shutil.copytree(CONFIGS / "rules", self._config / "rules")
        self.scrape({})
        self.address = address or free_address()
        super().__init__(
            name,
            [
                binaries["prometheus"],
                f"--config.file={self._config / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.data}",
                f"--web.listen-address={self.address}",
                "--web.enable-remote-write-receiver",
                "--web.enable-otlp-receiver",
                "--enable-feature=exemplar-storage",
            ],
            health_url=f"http://{self.address}/-/ready",
            folder=folder,
        )

    def scrape(self, targets: Mapping[str, Sequence[str]]) -> None:
        """Scrape these addresses, by job, and no others."""
        groups = [{"targets": list(addresses), "labels": {"job": job}} for job, addresses in targets.items()]
        temporary = self._config / ".targets.yml"
        temporary.write_text(json.dumps(groups), encoding="utf-8")  # JSON is YAML
        os.replace(temporary, self._config / "targets.yml")

    @property
    def query(self) -> Prometheus:
        """Its query API."""
        return Prometheus(f"http://{self.address}")

    @property
    def otlp_metrics(self) -> str:
        """The complete URL of its OTLP endpoint."""
        return f"http://{self.address}/api/v1/otlp/v1/metrics"

    @property
    def remote_write(self) -> str:
        """The URL that collectors write to."""
        return f"http://{self.address}/api/v1/write"
