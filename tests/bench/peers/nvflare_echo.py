"""NVFlare's client script: sends back what it gets, and notes when it got it. `nvflare.py` starts it."""

import sys
import time
from pathlib import Path

import nvflare.client as flare


def main(notes: Path) -> None:
    """Until the job ends."""
    flare.init()
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        with notes.open("a", encoding="utf-8") as file:
            file.write(f"{model.current_round} {time.time()}\n")
        flare.send(flare.FLModel(params=model.params, params_type=flare.ParamsType.FULL))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
