// Continue a text with a package of `planforge package BUNDLE --for genai`.
// dotnet add package Microsoft.ML.OnnxRuntimeGenAI; dotnet run -- FOLDER TEXT
using Microsoft.ML.OnnxRuntimeGenAI;

using var handle = new OgaHandle();
using var model = new Model(args[0]);
using var tokenizer = new Tokenizer(model);
// A begin token, where the model wants one.
tokenizer.UpdateOptions(new Dictionary<string, string> { ["add_special_tokens"] = "true" });
using var stream = tokenizer.CreateStream();
using var parameters = new GeneratorParams(model);
parameters.SetSearchOption("do_sample", false);
parameters.SetSearchOption("max_length", 128);
using var generator = new Generator(model, parameters);
generator.AppendTokenSequences(tokenizer.Encode(args[1]));
while (!generator.IsDone())
{
    generator.GenerateNextToken();
    Console.Write(stream.Decode(generator.GetSequence(0)[^1]));
}
Console.WriteLine();
