"""`python -m earlystop`."""

from earlystop.cli import main

if __name__ == "__main__":
    main()
