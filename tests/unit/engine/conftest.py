import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # scripted_runner, shared by the tests here
