"""`python -m webhooks` is the command `webhooks`."""

from webhooks.cli import main

if __name__ == "__main__":
    main()
