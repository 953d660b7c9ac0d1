"""The `streetcar` command: one file per subcommand, assembled here.

Invariants: nothing heavy is imported before a command runs (no torch, numpy or nats), so `--help`
is instant; a Problem is printed as code, cause and fix, and ends with status 1; Ctrl-C is 130.

Shell: the process's arguments and exit status.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError, Parameter

from services.cli.output import print_problem
from services.runtime.problem import Problem

INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141


COMMANDS: Final = {
    "up": ("services.cli.up:up", "Start the bus and all services; Ctrl-C stops them."),
    "restart": (
        "services.cli.restart:restart",
        "Restart the services of `up` one by one; no request fails.",
    ),
    "demo": ("services.cli.demo:demo", "Eight prompts at once through a cluster of its own."),
    "generate": ("services.cli.generate:generate", "Complete a prompt."),
    "chat": ("services.cli.chat:chat", "Talk with the model."),
    "ps": ("services.cli.ps:ps", "Services that are alive, and what they carry."),
    "top": ("services.cli.top:top", "Engines, lanes, queue, KV and the last steps, live."),
    "trace": ("services.cli.trace:trace", "Where the time of one request went."),
    "kv": ("services.cli.kv:app", "KV blocks: pools, tiers, tenants, hit rates; `kv check`."),
    "check": ("services.cli.check:check", "Score reference tokens, or measure perplexity."),
    "bench": (
        "services.cli.bench:app",
        "Measure the mesh, its scheduler, or servers side by side.",
    ),
    "sim": (
        "services.cli.sim:sim",
        "Plan capacity on the real scheduler, or replay fault histories.",
    ),
    "chaos": ("services.cli.chaos:app", "Break a mesh of its own, and check that nothing is lost."),
    "doctor": ("services.cli.doctor:doctor", "Check this machine and say what to mend."),
    "health": ("services.cli.health:health", "Wait for a heartbeat of a kind of service."),
    "models": ("services.cli.models:app", "Models: pull, list, path."),
    "keys": ("services.cli.keys:app", "API keys of the gateway: new, list, remove."),
    "config": ("services.cli.config:app", "Settings in force, and where each came from."),
}
"""Import path and one line of help of each command; the help is here so that listing the
commands imports none of them."""


def _version() -> str:
    try:
        return importlib.metadata.version("streetcar")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def build_app() -> App:
    """All commands; each module is imported when its command, or the help, needs it."""
    app = App(
        name="streetcar",
        help="Serve language models with continuous batching, as a mesh over NATS.",
        version=_version,
        result_action="return_value",
        default_parameter=Parameter(negative=()),
    )
    for name, (target, text) in COMMANDS.items():
        app.command(target, name=name, help=text)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its status."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = build_app()(tokens, exit_on_error=False, print_error=True)
    except CycloptsError:
        sys.exit(2)
    except Problem as problem:
        print_problem(problem, as_json="--json" in tokens)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader (`| head`) has had enough; nothing more may be written, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
