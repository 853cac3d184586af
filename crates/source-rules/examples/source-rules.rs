//! Prints the violations of a rule in a repository, including the permitted exceptions:
//!
//! ```text
//! cargo run -p source-rules --example source-rules -- FOLDER RULE [PREFIX]
//! ```
//!
//! The rule is one of `circles`, `purity`, `sizes`, `dependencies`, `layers`, `logs`, `module_layers`, `module_style`,
//! `publishing`, `reexports`, `threads` and `words`. Only files whose path begins with the prefix count.

use std::path::Path;

use anyhow::{Context, Result, bail};
use source_rules::circles::{self, Report};
use source_rules::config::REPOSITORY;
use source_rules::workspace::Workspace;
use source_rules::{
    dependencies, layers, logs, module_layers, module_style, publishing, purity, reexports, sizes, threads, words,
};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().context("no folder")?;
    let rule = arguments.next().context("no rule")?;
    let prefix = arguments.next().unwrap_or_default();
    let workspace = Workspace::read(Path::new(&folder), REPOSITORY)?;
    let problems = match rule.as_str() {
        "circles" => {
            print_circles(&workspace, &prefix);
            circles::unresolved(&workspace)
        }
        "publishing" => publishing::check(&workspace),
        "purity" => purity::check(&workspace),
        "sizes" => sizes::check(&workspace),
        "dependencies" => dependencies::check(&workspace),
        "layers" => layers::check(&workspace),
        "logs" => logs::check(&workspace),
        "module_layers" => module_layers::check(&workspace),
        "module_style" => module_style::check(&workspace),
        "reexports" => reexports::check(&workspace),
        "threads" => threads::check(&workspace),
        "words" => words::check(&workspace),
        rule => bail!("there is no rule {rule}"),
    };
    for problem in problems.iter().filter(|problem| problem.file.starts_with(&prefix)) {
        println!("{problem}");
    }
    Ok(())
}

/// Prints all circles.
fn print_circles(workspace: &Workspace, prefix: &str) {
    let arrows = circles::arrows(workspace);
    for circle in circles::circles(workspace, &arrows) {
        if circle.files.iter().any(|file| workspace.files[*file].path.starts_with(prefix)) {
            println!("{}", Report { workspace, arrows: &arrows, circle: &circle });
        }
    }
}
