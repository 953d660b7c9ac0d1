"""`streetcar restart`: each service of a running cluster in turn, with no request lost.

Invariant: a service whose successor cannot be started, and which still serves, goes on.

The command leaves an order beside the cluster's own file and sends SIGUSR2; `streetcar up`
takes it, and removes it when it is done, or says first why not. SIGUSR2 alone means all services.

Shell: a file, a signal.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Annotated, Final

from cyclopts import Parameter

from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.cli.running_file import find_cluster, is_alive, restart_failure, restart_order
from services.runtime.private_file import write_private
from services.runtime.problem import Problem

POLL_S: Final = 0.05
TIMEOUT_S: Final = 900.0


def restart(
    *,
    service: Annotated[list[str] | None, Parameter(help="one of `pids` of `up`")] = None,
    json_output: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Restart the services of the cluster that runs here: SIGTERM to one after the other, on with
    the next when its successor serves. Requests wait a moment; none fails.

    Parameters
    ----------
    service
        Only this one: gateway, admission, scheduler, worker or kv_store. May be given again.
    json_output
        Print the result as one object.
    """
    settings = ClusterOptions().settings()
    cluster = find_cluster(settings)
    if not cluster.pid:
        raise Problem(
            "E107",
            "No cluster of this machine",
            cause="only the `streetcar up` that started the services can restart them",
            fix="unset STREETCAR_NATS_URL",
        )
    order = restart_order(settings, cluster.pid)
    failure = restart_failure(settings, cluster.pid)
    failure.unlink(missing_ok=True)
    write_private(order, json.dumps(service or []))
    started = time.monotonic()
    os.kill(cluster.pid, signal.SIGUSR2)
    while order.exists():
        if not is_alive(cluster.pid):
            order.unlink(missing_ok=True)
            raise Problem("E403", "Cluster has ended", cause="a service did not come back")
        if time.monotonic() - started > TIMEOUT_S:
            raise Problem("E402", "Restart takes too long", cause=f"{TIMEOUT_S:g} s have passed")
        time.sleep(POLL_S)
    if failure.exists():
        problem = Problem(**json.loads(failure.read_bytes()))
        failure.unlink()
        raise problem
    took = round(time.monotonic() - started, 2)
    if json_output:
        print_json({"restarted": service or "all", "seconds": took})
    else:
        print(f"restarted {', '.join(service or ['all services'])} in {took:g} s")
    return 0
