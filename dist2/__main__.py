"""``python -m dist2``: the command ``dist2``."""

from dist2.cli import main

if __name__ == "__main__":
    main()
