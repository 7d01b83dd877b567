"""Prometheus metrics of a run on a loopback port."""

from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from resources.telemetry.attribution import IterationTimes
from resources.telemetry.verdict import Verdict


class PrometheusExporter:
    """Serves what the last iteration measured. A registry of its own, so that two runs in one process do not clash.

    Metrics: callsheet_step_seconds, callsheet_role_seconds{role, part}, callsheet_iterations_total,
    callsheet_bottleneck{role, cause} (share of the step it costs), callsheet_metric{name}.
    """

    def __init__(self, port: int = 0) -> None:
        """Listens on 127.0.0.1; port 0 picks a free one. Raises OSError naming the port if it is taken."""
        self.registry = CollectorRegistry()
        self._iterations = Counter("callsheet_iterations", "Iterations done", registry=self.registry)
        self._step = Gauge("callsheet_step_seconds", "Last step", registry=self.registry)
        self._roles = Gauge("callsheet_role_seconds", "Last step by role", ("role", "part"), registry=self.registry)
        self._bottleneck = Gauge(
            "callsheet_bottleneck", "Share of the step the named cause costs", ("role", "cause"), registry=self.registry
        )
        self._metrics = Gauge("callsheet_metric", "Metrics of the iteration", ("name",), registry=self.registry)
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            raise OSError(
                error.errno,
                f"port {port} of 127.0.0.1 is not free ({error.strerror});"
                " set telemetry.prometheus_port to another, or 0",
            ) from error
        self.port: int = self._server.server_port

    def publish(self, times: IterationTimes, verdict: Verdict, metrics: dict[str, float] | None = None) -> None:
        """Replaces what is served by this iteration's figures."""
        self._iterations.inc()
        self._step.set(times.step_seconds)
        self._roles.clear()
        for role in times.roles:
            parts = {
                "busy": role.busy,
                "transfer": role.transfer,
                "waiting": sum(role.waiting.values()),
                "idle": role.idle,
            }
            for part, seconds in parts.items():
                self._roles.labels(role.role, part).set(seconds)
        self._bottleneck.clear()
        self._bottleneck.labels(verdict.role, str(verdict.cause)).set(verdict.gain_fraction)
        for name, value in (metrics or {}).items():
            self._metrics.labels(name).set(value)

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> "PrometheusExporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
