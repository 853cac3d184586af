//! Forbids import circles of product files.
//!
//! An arrow leads from a file to each file that defines something it names: through re-exports to the definition, not
//! to the file that re-exports it. A `mod.rs` or `lib.rs` that only declares modules and re-exports has no arrows. A
//! circle is a set of files each of which reaches each other along arrows (a strongly connected component), so two
//! circles that share a file are one. See [`crate::imports`] for the definition of a name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use syn::Item;

use crate::Problem;
use crate::imports::{self, Usage};
use crate::modules::{Modules, Target};
use crate::workspace::{Part, Workspace};

/// Arrows between files: the dependency, by the indices of the two files.
pub type Arrows = BTreeMap<(usize, usize), BTreeMap<String, Tie>>;

/// Use of a name that another file defines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tie {
    /// First line that uses the name.
    pub line: usize,
    /// The name is only re-exported.
    pub reexport: bool,
}

/// Files that all reach each other.
#[derive(Clone, Debug)]
pub struct Circle {
    /// Indices of the files.
    pub files: BTreeSet<usize>,
}

/// Returns the circles. There should be none.
#[must_use]
pub fn check(workspace: &Workspace) -> Vec<Problem> {
    let arrows = arrows(workspace);
    circles(workspace, &arrows)
        .into_iter()
        .filter_map(|circle| {
            let first = *circle.files.first()?;
            let file = workspace.files[first].path.clone();
            let message = Report { workspace, arrows: &arrows, circle: &circle }.to_string();
            Some(Problem { file, line: 1, message })
        })
        .collect()
}

/// Returns the paths that begin with `crate` or `super` and that the resolver could not resolve. There should be none:
/// each may hide an arrow.
#[must_use]
pub fn unresolved(workspace: &Workspace) -> Vec<Problem> {
    let modules = Modules::of(workspace);
    let local = |name: &str| name.starts_with("crate::") || name.starts_with("super::") || name.starts_with("self::");
    imports::references(workspace, &modules)
        .into_iter()
        .filter(|reference| reference.targets.is_empty() && local(&reference.name))
        .map(|reference| Problem {
            file: workspace.files[reference.file].path.clone(),
            line: reference.line,
            message: format!("`{}` is not found in the sources", reference.name),
        })
        .collect()
}

/// Returns all arrows between product files.
#[must_use]
pub fn arrows(workspace: &Workspace) -> Arrows {
    let modules = Modules::of(workspace);
    let facades: BTreeSet<_> =
        workspace.product().filter(|(_, file)| is_facade(&file.product)).map(|(id, _)| id).collect();
    let mut arrows = Arrows::new();
    for reference in imports::references(workspace, &modules) {
        let silent = facades.contains(&reference.file) || !workspace.config.reexports_are_arrows;
        if silent && reference.usage == Usage::Reexport {
            continue;
        }
        for target in reference.targets {
            let Target::Item(item) = target else { continue };
            if item.file != reference.file && workspace.files[item.file].part == Part::Product {
                let reexport = reference.usage == Usage::Reexport;
                let ties = arrows.entry((reference.file, item.file)).or_default();
                let tie = ties.entry(item.name).or_insert(Tie { line: reference.line, reexport });
                tie.line = tie.line.min(reference.line);
                tie.reexport &= reexport;
            }
        }
    }
    arrows
}

/// Returns `true` if a file only declares modules and re-exports names.
fn is_facade(file: &syn::File) -> bool {
    file.items.iter().all(|item| match item {
        Item::Mod(module) => module.content.is_none(),
        Item::Use(_) | Item::ExternCrate(_) => true,
        _ => false,
    })
}

/// Returns all circles of at least two files, the largest first.
#[must_use]
pub fn circles(workspace: &Workspace, arrows: &Arrows) -> Vec<Circle> {
    let mut successors = vec![Vec::new(); workspace.files.len()];
    for (from, to) in arrows.keys() {
        successors[*from].push(*to);
    }
    let mut search = Tarjan { successors: &successors, states: vec![None; successors.len()], ..Tarjan::default() };
    for file in 0..successors.len() {
        if search.states[file].is_none() {
            search.visit(file);
        }
    }
    let mut circles = search.found;
    circles.retain(|circle| circle.files.len() > 1);
    circles.sort_by_key(|circle| (std::cmp::Reverse(circle.files.len()), circle.files.first().copied()));
    circles
}

/// Tarjan's search for strongly connected components (SIAM J. Comput. 1972).
#[derive(Default)]
struct Tarjan<'a> {
    successors: &'a [Vec<usize>],
    states: Vec<Option<State>>,
    stack: Vec<usize>,
    visited: usize,
    found: Vec<Circle>,
}

#[derive(Clone, Copy)]
struct State {
    index: usize,
    on_stack: bool,
}

impl Tarjan<'_> {
    /// Returns the lowest index that can be reached from `node`.
    fn visit(&mut self, node: usize) -> usize {
        let index = self.visited;
        self.visited += 1;
        self.stack.push(node);
        let mut lowest = index;
        self.states[node] = Some(State { index, on_stack: true });
        for &next in &self.successors[node] {
            match self.states[next] {
                None => lowest = lowest.min(self.visit(next)),
                Some(state) if state.on_stack => lowest = lowest.min(state.index),
                Some(_) => {}
            }
        }
        if lowest == index {
            let start = self.stack.iter().rposition(|entry| *entry == node).unwrap_or(0);
            let files: BTreeSet<_> = self.stack.drain(start..).collect();
            for file in &files {
                if let Some(state) = &mut self.states[*file] {
                    state.on_stack = false;
                }
            }
            self.found.push(Circle { files });
        }
        lowest
    }
}

/// Returns arrows whose removal breaks the circle: few, and with few names on them. The set is a good place to begin,
/// not the smallest possible one (that is NP-hard); it is found by the ordering of Eades, Lin and Smyth (1993).
#[must_use]
pub fn cuts(arrows: &Arrows, circle: &Circle) -> Vec<(usize, usize)> {
    let inside: Vec<_> = arrows
        .iter()
        .filter(|((from, to), _)| circle.files.contains(from) && circle.files.contains(to))
        .map(|((from, to), ties)| (*from, *to, ties.len()))
        .collect();
    let mut left = circle.files.clone();
    let (mut front, mut back) = (Vec::new(), Vec::new());
    while !left.is_empty() {
        let weight = |file: usize, out: bool| -> usize {
            let counts = |(from, to, ties): &(usize, usize, usize)| {
                let (own, other) = if out { (*from, *to) } else { (*to, *from) };
                if own == file && left.contains(&other) { *ties } else { 0 }
            };
            inside.iter().map(counts).sum()
        };
        let sink = left.iter().copied().find(|file| weight(*file, true) == 0);
        let source = left.iter().copied().find(|file| weight(*file, false) == 0);
        let strongest = left
            .iter()
            .copied()
            .max_by_key(|file| weight(*file, true).saturating_add(1000).saturating_sub(weight(*file, false)));
        let Some(next) = sink.or(source).or(strongest) else { break };
        left.remove(&next);
        if sink.is_some() { back.push(next) } else { front.push(next) }
    }
    front.extend(back.into_iter().rev());
    let floor: BTreeMap<_, _> = front.iter().enumerate().map(|(floor, file)| (*file, floor)).collect();
    inside.iter().filter(|(from, to, _)| floor[from] > floor[to]).map(|(from, to, _)| (*from, *to)).collect()
}

/// Describes a circle as text.
#[derive(Debug)]
pub struct Report<'a> {
    /// Workspace of the circle.
    pub workspace: &'a Workspace,
    /// The arrows of the workspace.
    pub arrows: &'a Arrows,
    /// The circle.
    pub circle: &'a Circle,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |file: usize| &self.workspace.files[file].path;
        writeln!(f, "import circle of {} files:", self.circle.files.len())?;
        for file in &self.circle.files {
            writeln!(f, "  {}", path(*file))?;
        }
        let cuts = cuts(self.arrows, self.circle);
        writeln!(f, "its arrows (those marked `cut` would open it):")?;
        for ((from, to), ties) in self.arrows {
            if self.circle.files.contains(from) && self.circle.files.contains(to) {
                let mark = if cuts.contains(&(*from, *to)) { "cut" } else { "   " };
                let names: Vec<_> = ties.iter().map(|(name, tie)| described(name, *tie)).collect();
                let names = names.join(", ");
                writeln!(f, "  {mark} {} -> {}: {names}", path(*from), path(*to))?;
            }
        }
        Ok(())
    }
}

fn described(name: &str, tie: Tie) -> String {
    let usage = if tie.reexport { "re-exported, line" } else { "line" };
    format!("{name} ({usage} {})", tie.line)
}
