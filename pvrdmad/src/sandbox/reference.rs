//! The table of system calls as text: `docs/sandbox.md` contains it, and a test compares the two.

use std::fmt::Write;

use pvrdma_base::threads::ThreadKind;

use super::calls::{self, Allowed, Group};
use super::profile::Profile;

/// Returns the groups of each kind of thread, and the system calls of each group.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from("| thread | software adapter | host's adapter beside |\n| --- | --- | --- |\n");
    for kind in ThreadKind::ALL {
        let rxe = names(&calls::groups(Profile::RxeAddressed, kind));
        let ibverbs = names(&calls::groups(Profile::Ibverbs, kind));
        let beside: Vec<_> = ibverbs.iter().filter(|name| !rxe.contains(name)).copied().collect();
        let _ = writeln!(text, "| `{kind}` | {} | {} |", rxe.join(", "), beside.join(", "));
    }
    text += "\n| group | for | system calls |\n| --- | --- | --- |\n";
    let groups = calls::base(Profile::Ibverbs).into_iter().chain([&calls::GUARD, &calls::KEEPER, &calls::OPEN]);
    for Group { name, purpose, calls } in groups {
        let calls: Vec<_> = calls
            .iter()
            .map(|call| match call.allowed {
                Allowed::Always => format!("`{}`", call.name),
                Allowed::When(_, words) => format!("`{}` ({words})", call.name),
            })
            .collect();
        let _ = writeln!(text, "| {name} | {purpose} | {} |", calls.join(", "));
    }
    text
}

fn names(groups: &[&Group]) -> Vec<&'static str> {
    groups.iter().map(|group| group.name).collect()
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// The page is generated on this architecture, because others lack a few old calls. `BLESS=1` writes it anew.
    #[test]
    fn the_page_about_the_sandbox_has_this_table() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sandbox.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (before, rest) = page.split_once("<!-- threads -->\n").unwrap();
        let (table, after) = rest.split_once("<!-- end -->").unwrap();
        if std::env::var_os("BLESS").is_some() {
            let page = format!("{before}<!-- threads -->\n{}<!-- end -->{after}", markdown());
            std::fs::write(path, page).unwrap();
        } else {
            assert!(table == markdown(), "docs/sandbox.md differs: run this test with BLESS=1");
        }
    }
}
