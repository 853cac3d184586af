//! Prints what the sources of a repository break:
//! `cargo run -p source-rules --example source-rules -- FOLDER [circles|purity|sizes|dependencies|module_style|words]`.

use std::path::Path;

use anyhow::{Result, bail};
use source_rules::circles::{self, Report};
use source_rules::config::REPOSITORY;
use source_rules::workspace::Workspace;
use source_rules::{dependencies, module_style, purity, sizes, words};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| ".".to_owned());
    let mut workspace = Workspace::read(Path::new(&folder), REPOSITORY)?;
    let problems = match arguments.next().as_deref() {
        None | Some("circles") => {
            print_circles(&mut workspace);
            circles::unresolved(&workspace)
        }
        Some("purity") => purity::check(&workspace),
        Some("sizes") => sizes::check(&workspace),
        Some("dependencies") => dependencies::check(&workspace),
        Some("module_style") => module_style::check(&workspace),
        Some("words") => words::check(&workspace),
        Some(rule) => bail!("there is no rule {rule}"),
    };
    for problem in problems {
        println!("{problem}");
    }
    Ok(())
}

/// Prints circles of two files, too, which are allowed.
fn print_circles(workspace: &mut Workspace) {
    for reexports_are_arrows in [false, true] {
        workspace.config.reexports_are_arrows = reexports_are_arrows;
        println!("# Circles, re-exports by files with items of their own count: {reexports_are_arrows}\n");
        let arrows = circles::arrows(workspace);
        for circle in circles::circles(workspace, &arrows) {
            println!("{}", Report { workspace, arrows: &arrows, circle: &circle });
        }
    }
}
