// Continue a text with a package of `planforge package BUNDLE --for genai`: generate FOLDER TEXT
// Needs ort_genai.h and the library of an onnxruntime-genai release.
#include <iostream>

#include "ort_genai.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  OgaHandle handle;
  auto model = OgaModel::Create(argv[1]);
  auto tokenizer = OgaTokenizer::Create(*model);
  const char* option = "add_special_tokens";  // a begin token, where the model wants one
  const char* value = "true";
  tokenizer->UpdateOptions(&option, &value, 1);
  auto stream = OgaTokenizerStream::Create(*tokenizer);
  auto parameters = OgaGeneratorParams::Create(*model);
  parameters->SetSearchOptionBool("do_sample", false);
  parameters->SetSearchOption("max_length", 128);
  auto prompt = OgaSequences::Create();
  tokenizer->Encode(argv[2], *prompt);
  auto generator = OgaGenerator::Create(*model, *parameters);
  generator->AppendTokenSequences(*prompt);
  while (!generator->IsDone()) {
    generator->GenerateNextToken();
    const auto token = generator->GetSequenceData(0)[generator->GetSequenceCount(0) - 1];
    std::cout << stream->Decode(token) << std::flush;
  }
  std::cout << '\n';
}
