"""The stock loop of the megatron-core wheel, with every step's losses written in full precision to one file.

megacpp-mcore launch -- examples/train_recorded.py FILE MEGATRON-ARGUMENTS
"""

import sys

from megacpp_mcore import pretrain
from megacpp_mcore.errors import LaunchError
from megacpp_mcore.observe import steps

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise LaunchError(
            f"train_recorded.py got {sys.argv[1:2]}; expected the file for the steps as its first argument"
        )
    with steps.recording(sys.argv.pop(1)) as message:
        print(message, flush=True)
        pretrain.main()
