//! As much of a workflow in YAML as documents use: the scripts of its steps.

/// What a step runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// Its name, if the line before says one.
    pub(super) name: Option<String>,
    /// The script.
    pub(super) script: String,
}

/// The steps that run something: `run: COMMAND`, or `run: |` with a script that is indented further.
pub(super) fn steps(text: &str) -> Vec<Step> {
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
            // The key's own column, behind the dash of a list.
            inside = several.then_some(line.len() - key.len());
            let script = if several { String::new() } else { format!("{command}\n") };
            steps.push(Step { name: name.take(), script });
        }
    }
    steps
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
}
