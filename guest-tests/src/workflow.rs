//! Steps of GitHub workflows and of composite actions, as a runner reads them.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use yaml_rust2::{Yaml, YamlLoader};

/// Named values of a step or of an action, as text.
pub(crate) type Values = BTreeMap<String, String>;

/// A step of a job or of an action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// Name, if it has one.
    pub(crate) name: String,
    /// The action that it calls, as `OWNER/NAME@VERSION`.
    pub(crate) action: Option<String>,
    /// Inputs for that action.
    pub(crate) inputs: Values,
    /// Variables of the script.
    pub(crate) environment: Values,
    /// The script, if it calls no action.
    pub(crate) script: Option<String>,
}

/// Returns the steps of a workflow's jobs, or of a composite action.
pub(crate) fn steps(text: &str) -> Result<Vec<Step>> {
    let file = read(text)?;
    let jobs = file["jobs"].as_hash().into_iter().flat_map(|jobs| jobs.values());
    let lists = jobs.chain([&file["runs"]]).map(|job| &job["steps"]);
    Ok(lists.filter_map(Yaml::as_vec).flatten().map(step).collect())
}

/// Returns the inputs of an action, with their default values.
pub(crate) fn defaults(action: &str) -> Result<Values> {
    let file = read(action)?;
    let inputs = file["inputs"].as_hash().into_iter().flatten();
    Ok(inputs.filter_map(|(name, input)| Some((text(name)?, text(&input["default"]).unwrap_or_default()))).collect())
}

/// Returns the value of an expression `${{ inputs.NAME … }}`, and any other text unchanged. Only the first input of an
/// expression is read.
pub(crate) fn evaluate(value: &str, inputs: &Values) -> String {
    let expression = value.strip_prefix("${{ inputs.").map(|rest| {
        let end = rest.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(rest.len());
        inputs.get(&rest[..end]).cloned().unwrap_or_default()
    });
    expression.unwrap_or_else(|| value.to_owned())
}

fn read(text: &str) -> Result<Yaml> {
    let mut documents = YamlLoader::load_from_str(text).context("this is not YAML")?;
    documents.pop().context("there is no YAML")
}

fn step(step: &Yaml) -> Step {
    Step {
        name: text(&step["name"]).unwrap_or_default(),
        action: text(&step["uses"]),
        inputs: values(&step["with"]),
        environment: values(&step["env"]),
        script: text(&step["run"]),
    }
}

fn values(map: &Yaml) -> Values {
    let pairs = map.as_hash().into_iter().flatten();
    pairs.filter_map(|(name, value)| Some((text(name)?, text(value)?))).collect()
}

fn text(value: &Yaml) -> Option<String> {
    match value {
        Yaml::String(text) | Yaml::Real(text) => Some(text.clone()),
        Yaml::Integer(number) => Some(number.to_string()),
        Yaml::Boolean(value) => Some(value.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values_of(pairs: &[(&str, &str)]) -> Values {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn steps_of_jobs_and_of_actions() {
        let text = "jobs:\n  one:\n    steps:\n      - name: One\n        run: |\n          a\n\n          b\n        env: {C: 1}\n      - uses: d/e@v1\n        with:\n          run: f g\n";
        let [one, two] = &steps(text).unwrap()[..] else { panic!("{:?}", steps(text)) };
        assert_eq!((one.name.as_str(), one.script.as_deref()), ("One", Some("a\n\nb\n")));
        assert_eq!((&one.environment, &one.action), (&values_of(&[("C", "1")]), &None));
        assert_eq!((two.action.as_deref(), &two.script), (Some("d/e@v1"), &None));
        assert_eq!(two.inputs, values_of(&[("run", "f g")]));
        let action = "inputs:\n  a:\n    default: b\n  c: {required: true}\nruns:\n  steps:\n    - run: d\n";
        assert_eq!(steps(action).unwrap()[0].script.as_deref(), Some("d"));
        assert_eq!(defaults(action).unwrap(), values_of(&[("a", "b"), ("c", "")]));
        assert!(steps("a: [").is_err() && steps("").is_err());
    }

    #[test]
    fn inputs_in_expressions() {
        let inputs = values_of(&[("run", "make check"), ("release", "file:///r")]);
        assert_eq!(evaluate("${{ inputs.run }}", &inputs), "make check");
        assert_eq!(evaluate("${{ inputs.release || format('{0}', github.action_ref) }}", &inputs), "file:///r");
        assert_eq!(evaluate("${{ inputs.other }}", &inputs), "");
        assert_eq!(evaluate("plain", &inputs), "plain");
    }
}
