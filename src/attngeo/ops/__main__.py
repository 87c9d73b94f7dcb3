"""`python -m attngeo.ops`: print the backend chosen for each operator, device and type, and why."""

from attngeo.ops.backend import table

HEADINGS = ("operator", "device", "types", "backend", "why")


def main() -> None:
    """Print the table of `attngeo.ops.backend.table`."""
    rows = [HEADINGS, *table()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS) - 1)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + f"  {row[-1]}")


if __name__ == "__main__":
    main()
