"""What every stage keeps: `from tests.contract import *` in a stage's test file runs all of it.

Written against the public face of an engine alone, so that a right engine passes however it is
built inside. Names with a letter and a number (B10, S7) are those of well-known faults of engines
of this kind: B blocks, C chunks, S scheduling, A abort, K kernels, M sampling, D and T text.
"""

from .abort_and_errors import *  # noqa: F403
from .identity import *  # noqa: F403
from .limits import *  # noqa: F403
from .memory import *  # noqa: F403
from .records import *  # noqa: F403
from .sampling import *  # noqa: F403
from .scheduling import *  # noqa: F403
from .streaming import *  # noqa: F403
