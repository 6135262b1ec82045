"""``python -m hotbed``, for torchrun."""

from hotbed_command import main

if __name__ == "__main__":
    main()
