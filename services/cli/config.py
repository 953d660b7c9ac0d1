"""`streetcar config`: the settings in force, and where each came from.

Shell: reads the environment and one file, through the settings.
"""

from __future__ import annotations

from cyclopts import App

from services.cli.options import ClusterOptions
from services.cli.output import print_json
from services.contracts.subjects import Subjects
from services.runtime.bus_access import authorization, limits
from services.runtime.settings import knobs

app = App(name="config", help="Settings: file < environment (STREETCAR_*) < flag.")


@app.command
def show(options: ClusterOptions | None = None, *, json: bool = False) -> int:
    """Show every setting, its value and its origin.

    Parameters
    ----------
    json
        Print one object: value and origin by name.
    """
    settings = (options or ClusterOptions()).settings()
    values = settings.to_dict()
    if json:
        origins = {name: settings.origin(name) for name in values}
        print_json({n: {"value": v, "origin": origins[n]} for n, v in values.items()})
        return 0
    width = max(map(len, values))
    for knob in knobs():
        value = values[knob.name]
        shown = '""' if value == "" else str(value)
        origin = settings.origin(knob.name)
        print(f"{knob.name:<{width}}  {shown:<16}  {origin:<28}  {knob.metadata['help']}")
    return 0


@app.command
def bus(options: ClusterOptions | None = None) -> int:
    """Print limits, users and permissions for a nats-server of your own, to be included.

    The passwords are read by that server from its environment: NATS_PASSWORD_ADMISSION and so on.
    """
    prefix = (options or ClusterOptions()).settings().subject_prefix
    print("# Made by `streetcar config bus`.")
    print("\n".join([*limits(), *authorization(Subjects(prefix))]))
    return 0
