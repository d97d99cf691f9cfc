"""``python scripts/lab``: see `lab.commands`."""

import sys
from pathlib import Path

# Python puts this folder itself on the path, where its modules would hide others.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lab.commands import main  # noqa: E402

sys.exit(main())
