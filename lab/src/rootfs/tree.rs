//! The tree that layers result in. Paths are resolved in it and never on this machine.
//!
//! The parent of each node is a folder of the tree. So the path of a node leads through no symbolic link.

use std::collections::BTreeMap;

use super::budget::{Budget, Limits};
use super::header::Meta;
use super::path::{Target, TreePath};
use super::refusal::Reason;

/// Number of a stored content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct FileId(pub(super) u64);

/// Maximum number of symbolic links in a path, as in Linux.
const MOST_LINKS: u32 = 40;

/// A node of the tree.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub content: Content,
    pub meta: Meta,
    /// Number of the layer that added it, or something below it.
    layer: u32,
    /// The layer has an entry for it.
    is_named: bool,
}

/// Content of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Folder,
    /// Stored content. Nodes with the same one are hard links to each other.
    File(FileId),
    Symlink(Target),
    Pipe,
}

/// Nodes of all layers so far.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: BTreeMap<TreePath, Node>,
    layer: u32,
    /// Limits of the nodes: an entry creates the folders that lead to it, and a link can make its path longer.
    budget: Budget,
}

impl Tree {
    /// Creates a tree that consists of its root.
    pub(super) fn new(limits: Limits) -> Self {
        let root = Node { content: Content::Folder, meta: Meta::FOLDER, layer: 0, is_named: false };
        Self { nodes: BTreeMap::from([(TreePath::default(), root)]), layer: 0, budget: Budget::new(limits) }
    }

    /// Begins the next layer.
    pub(super) fn next_layer(&mut self) {
        self.layer = self.layer.saturating_add(1);
    }

    /// Iterates over all nodes, each folder before its content.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&TreePath, &Node)> {
        self.nodes.iter()
    }

    /// Returns the place of an entry: the folder that its path leads to, which is created, and its name in it.
    ///
    /// # Errors
    /// The path leads through a file, or through cyclic links.
    pub(super) fn place(&mut self, path: &TreePath) -> Result<TreePath, Reason> {
        match path.split_last() {
            Some((parent, name)) => self.resolve(&parent)?.join(name),
            None => Ok(TreePath::default()),
        }
    }

    /// Adds a node at a place.
    ///
    /// # Errors
    /// The layer contains the place already.
    pub(super) fn add(&mut self, place: TreePath, content: Content, meta: Meta) -> Result<(), Reason> {
        let is_folder = content == Content::Folder;
        if place.is_root() && !is_folder {
            return Err(Reason::NoFolder);
        }
        self.budget.entry(place.as_bytes().len())?;
        if let Some(old) = self.nodes.get(&place) {
            if old.layer == self.layer && (old.is_named || !is_folder) {
                return Err(Reason::Duplicate);
            }
            if !is_folder || old.content != Content::Folder {
                self.remove_where(&place, |_| true);
            }
        }
        self.nodes.insert(place, Node { content, meta, layer: self.layer, is_named: true });
        Ok(())
    }

    /// Adds a hard link to an entry.
    ///
    /// # Errors
    /// There is no file at its path, or the layer contains the place already.
    pub(super) fn add_link(&mut self, place: TreePath, to: &TreePath) -> Result<(), Reason> {
        let target = self.place(to)?;
        match self.nodes.get(&target) {
            Some(node) if node.content != Content::Folder => {
                let Node { content, meta, .. } = node.clone();
                self.add(place, content, meta)
            }
            _ => Err(Reason::NoFile(String::from_utf8_lossy(to.as_bytes()).into_owned())),
        }
    }

    /// Removes the files of lower layers at a path.
    pub(super) fn white_out(&mut self, place: &TreePath) {
        let layer = self.layer;
        self.remove_where(place, |node| node.layer < layer);
    }

    /// Removes the files of lower layers in a folder.
    pub(super) fn white_out_content(&mut self, folder: &TreePath) {
        let kept = self.nodes.get(folder).cloned();
        self.white_out(folder);
        if let Some(node) = kept {
            self.nodes.insert(folder.clone(), node);
        }
    }

    /// Returns the path that a path leads to when all symbolic links in it are followed, and creates missing folders.
    fn resolve(&mut self, path: &TreePath) -> Result<TreePath, Reason> {
        // The names that are still to follow, the next one last.
        let mut names: Vec<Vec<u8>> = path.components().map(<[u8]>::to_vec).collect();
        names.reverse();
        let (mut at, mut links) = (TreePath::default(), 0);
        while let Some(name) = names.pop() {
            if name == b".." {
                at = at.split_last().map(|(parent, _)| parent).unwrap_or_default();
                continue;
            }
            let next = at.join(&name)?;
            match self.nodes.get(&next).map(|node| &node.content) {
                Some(Content::Symlink(target)) => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(Reason::Cyclic);
                    }
                    if target.as_bytes().starts_with(b"/") {
                        at = TreePath::default();
                    }
                    let target = target.as_bytes().split(|&byte| byte == b'/').rev();
                    names.extend(target.filter(|name| !name.is_empty() && *name != b".").map(<[u8]>::to_vec));
                }
                Some(Content::Folder) | None => {
                    self.folder_at(&next)?;
                    at = next;
                }
                Some(Content::File(_) | Content::Pipe) => return Err(Reason::NoFolder),
            }
        }
        Ok(at)
    }

    /// Marks a folder as part of this layer, and creates it if it is missing.
    fn folder_at(&mut self, path: &TreePath) -> Result<(), Reason> {
        let layer = self.layer;
        if let Some(node) = self.nodes.get_mut(path) {
            if node.layer < layer {
                node.layer = layer;
                node.is_named = false;
            }
            return Ok(());
        }
        self.budget.entry(path.as_bytes().len())?;
        let node = Node { content: Content::Folder, meta: Meta::FOLDER, layer, is_named: false };
        self.nodes.insert(path.clone(), node);
        Ok(())
    }

    /// Removes those nodes at a path and below it for which `unwanted` returns `true`.
    fn remove_where(&mut self, path: &TreePath, unwanted: impl Fn(&Node) -> bool) {
        let below = self.nodes.range(path.clone()..).take_while(|(at, _)| path.contains(at));
        let found: Vec<_> = below.filter(|(_, node)| unwanted(node)).map(|(at, _)| at.clone()).collect();
        for path in &found {
            self.nodes.remove(path);
        }
    }
}
