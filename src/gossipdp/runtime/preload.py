"""What the fork server imports once, so that its workers start within milliseconds.

Imports only: nothing here may compute, since a thread pool that computing starts does not survive
the fork.
"""

import joblib  # noqa: F401
import msgspec  # noqa: F401
import networkx  # noqa: F401
import scipy.linalg  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo  # what the first optimizer of each worker would import, a second of CPU time
import torch.distributed
import torch.utils.data  # noqa: F401
