"""Run by a Python that has `llm`: what it gets from the server at argv[1], as JSON.

Its models are named in a file, here of the working directory: one asks for chats, the other for responses.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["LLM_USER_PATH"] = os.getcwd()

import llm

can = {"supports_schema": True, "supports_tools": True}
shared = {"model_name": "tiny", "api_base": sys.argv[1] + "/v1", **can}
models = [{"model_id": "chat", **shared}, {"model_id": "response", "responses": True, **shared}]
Path("extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
TOOL = json.loads(sys.argv[2])["function"]
OFFERED = llm.Tool(TOOL["name"], TOOL["description"], TOOL["parameters"], lambda warm: "")
SCHEMA = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"]}
texts, tokens, formed = {}, [], []
for name, stream in (("chat", False), ("chat", True), ("response", False), ("response", True)):
    ask = partial(llm.get_model(name).prompt, "Hello", temperature=0, stream=stream)
    reply = ask(max_tokens=24)
    texts[f"{name}, {stream=}"] = reply.text()
    if name == "chat" or not stream:  # of streamed responses it reads the usage of those that are whole
        tokens.append(reply.usage().output)
    assert ask(max_tokens=24, tools=[OFFERED]).text()
    reply = ask(max_tokens=60, schema={**SCHEMA, "additionalProperties": False})
    formed.append(json.dumps(json.loads(reply.text())["ok"]))
print(json.dumps({"texts": texts, "tokens": tokens, "calls": [], "formed": formed}))
