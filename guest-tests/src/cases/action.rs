//! The GitHub action of this repository, as the workflow of the document calls it.

use anyhow::{Context, Result, ensure};

use super::recipe::{action, workflow};
use crate::workflow::{Step, Values, defaults, evaluate, steps};

/// Returns the steps that the document's workflow runs in the action of this repository, each with its script and the
/// variables of that script.
pub(super) fn steps_of_action(inputs: &[(&str, &str)]) -> Result<Vec<Step>> {
    let call = steps(&workflow()?)?.into_iter().find(|step| !step.inputs.is_empty() && is_ours(step));
    let call = call.context("the workflow does not use the action")?;
    let action = action()?;
    let mut values: Values = defaults(&action)?;
    for name in call.inputs.keys() {
        ensure!(values.contains_key(name), "the action has no input {name}");
    }
    values.extend(call.inputs);
    values.extend(inputs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let mut steps = steps(&action)?;
    for value in steps.iter_mut().flat_map(|step| step.environment.values_mut()) {
        *value = evaluate(value, &values);
    }
    Ok(steps)
}

fn is_ours(step: &Step) -> bool {
    step.action.as_ref().is_some_and(|action| !action.starts_with("actions/"))
}
