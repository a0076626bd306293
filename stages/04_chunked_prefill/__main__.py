"""Every stage is a program: `python -m stages.NN_name "Why is the sky blue?"`."""

import sys

from shared.programs.cli import main

from .engine import LLMEngine

if __name__ == "__main__":
    sys.exit(main(LLMEngine))
