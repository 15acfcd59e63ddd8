"""The fork server's own process group, so that signals to its caller's group do not end it.

The fork server alone imports this, and with it every worker would end; elsewhere it does nothing.
"""

import os
import sys

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    os.setpgid(0, 0)
