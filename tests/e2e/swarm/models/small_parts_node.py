"""`node` with a bound on parts of files that a tiny model reaches too."""

from node.cli import main
from swarm.models import tensor_files

if __name__ == "__main__":
    tensor_files.MIN_SAVED_BYTES = 1000  # type: ignore[misc]
    tensor_files.GAP_BYTES = 64  # type: ignore[misc]
    main()
