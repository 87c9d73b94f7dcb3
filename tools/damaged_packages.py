"""Print name==version of each installed distribution that lacks files which its own record lists, or has short ones.

An installer killed half-way leaves such packages behind and later takes them for complete.
"""

import os
from importlib import metadata


def is_damaged(distribution: metadata.Distribution) -> bool:
    """Whether a recorded file is missing or has another size than recorded, or the installer did not finish."""
    if distribution.read_text("INSTALLER") is None:
        return True
    for file in distribution.files or []:
        if file.size is None:
            continue
        try:
            size = os.stat(str(distribution.locate_file(file))).st_size
        except FileNotFoundError:
            return True
        if size != file.size:
            return True
    return False


def main() -> None:
    """Print the damaged distributions of this interpreter, one a line."""
    for distribution in metadata.distributions():
        if distribution.metadata["Name"] and is_damaged(distribution):
            print(f"{distribution.metadata['Name']}=={distribution.version}")


if __name__ == "__main__":
    main()
