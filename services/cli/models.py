"""`streetcar models`: pull, list, path.

Shell: files and the network, through the catalog.
"""

from __future__ import annotations

from cyclopts import App

from services.cli.output import ProgressLine, print_json
from services.models import catalog

app = App(name="models", help="Models: what there is, where it lies, how it comes here.")


@app.command
def pull(name: str = catalog.EMBEDDED.name, *, json: bool = False) -> int:
    """Fetch a known model into the cache.

    Parameters
    ----------
    name
        A name of `streetcar models list`.
    json
        Print the result as JSON.
    """
    path = catalog.pull(name, ProgressLine(name).update)
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        print(path)
    return 0


@app.command(name="list")
def list_models(*, json: bool = False) -> int:
    """Show the known models and whether they are here.

    Parameters
    ----------
    json
        Print one object per model.
    """
    for entry in catalog.known():
        pulled = catalog.is_pulled(entry)
        if json:
            print_json(
                {
                    "name": entry.name,
                    "description": entry.description,
                    "size_bytes": entry.size,
                    "pulled": pulled,
                    "path": str(catalog.cached_path(entry)),
                }
            )
            continue
        state = "here" if pulled else "not pulled"
        print(f"{entry.name:<16} {entry.size / 1e6:>6.0f} MB  {state:<11} {entry.description}")
    return 0


@app.command
def path(name: str = catalog.EMBEDDED.name, *, json: bool = False) -> int:
    """Print where a model's file lies.

    Parameters
    ----------
    name
        A known name, or a path.
    json
        Print the result as JSON.
    """
    found = catalog.path(name)
    if json:
        print_json({"name": name, "path": str(found)})
    else:
        print(found)
    return 0
