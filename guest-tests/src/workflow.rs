//! Parser for the subset of YAML workflows that documents use: the scripts of the steps, and the environment of the
//! job.

/// A step that runs a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Name, if the line before gives one.
    pub(crate) name: Option<String>,
    /// The script.
    pub(crate) script: String,
}

/// Returns the steps that run something: `run: COMMAND`, or `run: |` with a script that is indented further.
pub(crate) fn steps(text: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let (mut name, mut inside) = (None, None);
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        if let (Some(parent), Some(step)) = (inside, steps.last_mut())
            && (indent > parent || line.trim().is_empty())
        {
            step.script.push_str(line);
            step.script.push('\n');
            continue;
        }
        inside = None;
        let key = line.trim_start().trim_start_matches("- ");
        if let Some(said) = key.strip_prefix("name: ") {
            name = Some(said.trim().to_owned());
        } else if let Some(command) = key.strip_prefix("run: ") {
            let several = command.trim() == "|";
            // The column of the key itself, after the dash of a list.
            inside = several.then_some(line.len() - key.len());
            let script = if several { String::new() } else { format!("{command}\n") };
            steps.push(Step { name: name.take(), script });
        }
    }
    steps
}

/// Returns the variables below the first `env:`.
pub(crate) fn environment(text: &str) -> Vec<(String, String)> {
    let mut lines = text.lines().skip_while(|line| line.trim() != "env:");
    let indent = |line: &str| line.len() - line.trim_start().len();
    let parent = lines.next().map_or(0, indent);
    let variables = lines.take_while(|line| indent(line) > parent).filter_map(|line| line.split_once(": "));
    variables.map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_of_steps() {
        let text = "steps:\n  - name: One\n    run: |\n      a\n\n      b\n    env: {}\n  - run: c d\n  - uses: e\n";
        let [one, two] = &steps(text)[..] else { panic!("{:?}", steps(text)) };
        assert_eq!((one.name.as_deref(), one.script.as_str()), (Some("One"), "      a\n\n      b\n"));
        assert_eq!((&two.name, two.script.as_str()), (&None, "c d\n"));
    }

    #[test]
    fn variables_of_a_job() {
        let text = "on: [push]\njobs:\n  one:\n    env:\n      A: b c\n      D: e\n    steps:\n      - run: f\n";
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(environment(text), [pair("A", "b c"), pair("D", "e")]);
        assert_eq!(environment("steps: []\n"), []);
    }
}
