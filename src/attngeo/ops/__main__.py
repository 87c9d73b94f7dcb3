"""`python -m attngeo.ops`: print every operator, its implementations, and why each can or cannot run here."""

from attngeo.ops.backend import table


def main() -> None:
    """Print the table of `attngeo.ops.backend.table`."""
    rows = [("operator", "backend", "device", "state"), *table()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[3])


if __name__ == "__main__":
    main()
