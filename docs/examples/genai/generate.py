"""Continue a text with a package for onnxruntime-genai: python generate.py FOLDER TEXT."""

from __future__ import annotations

import sys

import onnxruntime_genai as genai

if len(sys.argv) != 3:
    sys.exit("usage: python generate.py FOLDER TEXT")
folder, text = sys.argv[1:]
model = genai.Model(folder)
tokenizer = genai.Tokenizer(model)
tokenizer.update_options(add_special_tokens="true")  # a begin token, where the model wants one
stream = tokenizer.create_stream()
parameters = genai.GeneratorParams(model)
parameters.set_search_options(do_sample=False, max_length=128)
generator = genai.Generator(model, parameters)
generator.append_tokens(tokenizer.encode(text))
while not generator.is_done():
    generator.generate_next_token()
    print(stream.decode(generator.get_next_tokens()[0]), end="", flush=True)
print()
