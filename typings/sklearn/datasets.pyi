# scikit-learn has no types, and pyright infers wrong ones. The examples use this function alone.
from typing import Any

def load_digits() -> Any: ...
