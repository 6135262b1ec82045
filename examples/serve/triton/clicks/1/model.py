"""A bundle in Triton's Python backend, with NumPy and onnxruntime; read_bundle.py lies beside this file."""

import json
import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parent))
from read_bundle import Bundle  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = Path(config["parameters"]["bundle"]["string_value"])
        self.bundle = Bundle(
            folder if folder.is_absolute() else Path(args["model_repository"]) / folder
        )
        self.dtypes = {
            each["name"]: pb_utils.triton_string_to_numpy(each["data_type"])
            for each in config["output"]
        }

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        asked = {}
        for each in self.bundle.about["inputs"]:
            values = pb_utils.get_input_tensor_by_name(request, each["name"]).as_numpy()
            asked[each["name"]] = values[:, 0] if not each["shape"] else values
        try:
            found = self.bundle.predict(asked)
        except ValueError as error:  # an id outside of a static table
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        outputs = [
            pb_utils.Tensor(name, np.asarray(found[name].reshape(len(found[name]), -1), dtype))
            for name, dtype in self.dtypes.items()
        ]
        return pb_utils.InferenceResponse(outputs)
