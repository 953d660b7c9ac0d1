"""`streetcar keys`: API keys of the gateway; a running one follows the file at once.

Shell: one small file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from services.cli.output import print_json
from services.gateway.api_keys import draw_key, read_keys, write_keys
from services.runtime.problem import Problem
from services.runtime.settings import load

app = App(name="keys", help="API keys of the gateway: new, list, remove.")

_File = Annotated[str | None, Parameter(name="--file", help="else the one in the settings")]


@app.command
def new(name: str, *, file: _File = None, json: bool = False) -> int:
    """Add a key and print it; it is shown this once, the file keeps its hash.

    Parameters
    ----------
    name
        Whose key it is; to remove it later.
    json
        Print the result as one object.
    """
    path = _path(file)
    keys = read_keys(path) if path.exists() else {}
    if name in keys:
        raise Problem("E108", "API key is there", cause=f"{path} has a key of {name!r}")
    key, keys[name] = draw_key()
    write_keys(path, keys)
    read_keys(path)
    if json:
        print_json({"name": name, "key": key, "file": str(path)})
    else:
        print(key)
    return 0


@app.command(name="list")
def list_keys(*, file: _File = None, json: bool = False) -> int:
    """Show the names of the keys.

    Parameters
    ----------
    json
        Print one object per key.
    """
    for name in read_keys(_path(file)):
        if json:
            print_json({"name": name})
        else:
            print(name)
    return 0


@app.command
def remove(name: str, *, file: _File = None) -> int:
    """Remove a key; who uses it is refused from now on.

    Parameters
    ----------
    name
        As given to `keys new`.
    """
    path = _path(file)
    keys = read_keys(path)
    if keys.pop(name, None) is None:
        raise Problem("E108", "No such API key", cause=f"{path} has no key of {name!r}")
    write_keys(path, keys)
    return 0


def _path(file: str | None) -> Path:
    named = file or load().api_key_file
    if not named:
        raise Problem(
            "E108",
            "No file of API keys",
            cause="neither --file nor the setting api_key_file names one",
            fix="--file streetcar-keys.txt   or   STREETCAR_API_KEY_FILE",
        )
    return Path(named).expanduser()
