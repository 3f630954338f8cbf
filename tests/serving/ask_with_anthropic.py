"""Run by a Python that has `anthropic`: what it gets from the server at argv[1], as JSON."""

import json
import sys

import anthropic

HELLO = [{"role": "user", "content": "Hello"}]
ASKED = {"model": "tiny", "messages": HELLO, "max_tokens": 24}
PLAIN = {"extra_body": {"temperature": 0}}
FUNCTION = json.loads(sys.argv[2])["function"]
TOOL = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
CALLING = {**ASKED, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 90}
FORM = {"format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}}

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
whole = client.messages.create(**ASKED, **PLAIN)
with client.messages.stream(**ASKED, **PLAIN) as stream:
    text = "".join(stream.text_stream)
    streamed = stream.get_final_message()
with client.messages.stream(**CALLING) as stream:
    (called,) = stream.get_final_message().content
(call,) = client.messages.create(**CALLING).content
history = [
    *HELLO,
    {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
]
history += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "yes"}]}]
assert client.messages.create(**{**ASKED, "messages": history}, tools=[TOOL]).content
counted = client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens
assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
try:
    client.messages.create(**{**ASKED, "max_tokens": 0})
    refused = None
except anthropic.BadRequestError as error:
    refused = error.body["error"]["message"].partition(":")[0]
found = {
    "texts": {"whole": whole.content[0].text, "text": text, "streamed": streamed.content[0].text},
    "tokens": [whole.usage.output_tokens, streamed.usage.output_tokens],
    "calls": [[each.name, json.dumps(each.input)] for each in (call, called)],
    "formed": [client.messages.create(**ASKED, extra_body={"output_config": FORM}).content[0].text],
    "refused": refused,
}
print(json.dumps(found))
