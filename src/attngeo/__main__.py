"""`python -m attngeo`, which is also what `torchrun -m attngeo` starts in each of its processes."""

from attngeo.cli import main

if __name__ == "__main__":
    main()
