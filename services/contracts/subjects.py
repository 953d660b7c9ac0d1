"""Every subject of the mesh, in one place (DESIGN section 3).

Pure. Ids are checked where they enter the mesh; a bad id here is a bug and raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvariantError
from .ids import is_id

DEFAULT_PREFIX = "streetcar.v1"
ADMISSION_QUEUE = "admission"


def _token(text: str) -> str:
    if not is_id(text):
        raise InvariantError(f"not a subject token: {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builds subjects under `prefix`; `any_*` are the wildcards that a receiver subscribes to."""

    prefix: str = DEFAULT_PREFIX

    # Public: clients.
    def generate(self, model: str) -> str:
        return f"{self.prefix}.generate.{_token(model)}"

    @property
    def any_generate(self) -> str:
        # `>` and not `*`: a model name with a dot must get an error frame, not silence.
        return f"{self.prefix}.generate.>"

    def cancel(self, request_id: str) -> str:
        return f"{self.prefix}.cancel.{_token(request_id)}"

    @property
    def any_cancel(self) -> str:
        return f"{self.prefix}.cancel.*"

    def resume(self, request_id: str) -> str:
        return f"{self.prefix}.resume.{_token(request_id)}"

    @property
    def any_resume(self) -> str:
        return f"{self.prefix}.resume.*"

    # An engine: its scheduler and rank 0 of its worker group.
    def submit(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.submit"

    def abort(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.abort"

    def plan(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.plan"

    def result(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.result"

    def attach(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.attach"

    def poll(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.poll"

    def steps(self, engine: str) -> str:
        return f"{self.prefix}.engine.{_token(engine)}.steps"

    @property
    def any_steps(self) -> str:
        return f"{self.prefix}.engine.*.steps"

    # Admission.
    def updates(self, admission: str) -> str:
        return f"{self.prefix}.admission.{_token(admission)}.updates"

    @property
    def adopt(self) -> str:
        """Heard by one admission of the queue group."""
        return f"{self.prefix}.admission.adopt"

    # The ledger.
    def lookup(self, engine: str) -> str:
        return f"{self.prefix}.kv.{_token(engine)}.lookup"

    def lease(self, engine: str) -> str:
        return f"{self.prefix}.kv.{_token(engine)}.lease"

    def delta(self, engine: str) -> str:
        return f"{self.prefix}.kv.{_token(engine)}.delta"

    def kv_report(self, engine: str) -> str:
        return f"{self.prefix}.kv.{_token(engine)}.report"

    def kv_check(self, engine: str) -> str:
        return f"{self.prefix}.kv.{_token(engine)}.check"

    @property
    def any_kv(self) -> str:
        """Lookups, leases and deltas of every engine: one subscription, so that they stay in
        order.
        """
        return f"{self.prefix}.kv.*.*"

    # Liveness.
    def beat(self, kind: str, service_id: str) -> str:
        return f"{self.prefix}.beat.{_token(kind)}.{_token(service_id)}"

    def any_beat(self, kind: str = "*") -> str:
        return f"{self.prefix}.beat.{kind}.*"

    # Traces: asked of every service; closed spans, for those that keep them for others.
    def trace(self, request_or_trace_id: str) -> str:
        return f"{self.prefix}.trace.{_token(request_or_trace_id)}"

    @property
    def any_trace(self) -> str:
        return f"{self.prefix}.trace.*"

    @property
    def spans(self) -> str:
        return f"{self.prefix}.spans"

    def tail(self, subject: str, parts: int) -> str:
        """The part of `subject` after the prefix and `parts` further tokens.

        tail("streetcar.v1.generate.m", 1) = "m"; tail("streetcar.v1.kv.e.lease", 1) = "e.lease".
        """
        rest = subject[len(self.prefix) + 1 :]
        return rest.split(".", parts)[parts]
