"""Two runs in one folder: the second is refused, unless the first is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from veca.errors import InputError
from veca.files import lock_folder
from veca.finetune.engine import finetune
from veca.tasks.classify import ClassifyFineTune as Classify

HOLDER = """
import os, sys, time
from pathlib import Path
from veca.files import lock_folder
with lock_folder(Path(sys.argv[1])):
    if os.fork():
        print("locked", flush=True)
    time.sleep(60)
"""


def test_a_lock_ends_with_its_process_although_a_worker_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            line = r"another run is writing to .*; wait, or use another --out"
            with pytest.raises(InputError, match=line), lock_folder(tmp_path):
                pass
            settings = Classify(data=tmp_path, model="veca-s14", out=tmp_path)
            with pytest.raises(InputError, match="another run is writing to"):  # before anything else is looked at
                finetune(None, None, settings, 224)  # type: ignore[arg-type]
            holder.kill()
            while holder.poll() is None:
                time.sleep(0.01)
            with lock_folder(tmp_path):
                pass
        finally:
            os.killpg(holder.pid, signal.SIGKILL)
