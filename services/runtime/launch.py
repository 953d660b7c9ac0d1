"""Starts a program so that it dies with the process that started it.

Run as `python -I -S launch.py PARENT_PID PROGRAM ARGS...`: asks the kernel for SIGKILL at the
parent's death, makes sure that the parent still lives, and becomes the program. This needs no
code between fork and exec in the parent, which is unsafe where threads run. Elsewhere than on
Linux the program is started without this tie.

Shell: replaces its own process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def launch_command(command: Sequence[str]) -> list[str]:
    """`command` wrapped so that it dies with this process; argv for a subprocess call.

    To be called by the thread that stays: the kernel ties the child to the thread that forks.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _main() -> None:
    import ctypes
    import signal

    parent = int(sys.argv[1])
    command = sys.argv[2:]
    set_parent_death_signal = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    _main()
