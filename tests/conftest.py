"""Every test process computes with one thread, beside the other workers; a test that needs more says so itself.

After the number of threads was raised above that of the cores and lowered to another above 1, torch's own LU (oneMKL)
fails in that process; at one thread it does not.
"""

import torch

torch.set_num_threads(1)
