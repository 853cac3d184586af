//! Paths in a tree: they never leave it.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::refusal::Reason;

/// Length limits in bytes: those of Linux.
const LONGEST_PATH: usize = 4095;
const LONGEST_NAME: usize = 255;
/// Maximum number of components.
const DEEPEST: usize = 128;

/// Path of an entry relative to the root of the tree, which is the empty path. It consists of plain names, without `.`,
/// `..`, empty ones, or control characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TreePath(Vec<u8>);

impl TreePath {
    /// Parses a path of an archive, in which `./` and a trailing slash have no meaning.
    ///
    /// # Errors
    /// It is not relative to the root, or leaves it, or is longer than a path may be.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Reason> {
        if bytes.starts_with(b"/") {
            return Err(Reason::Absolute);
        }
        if bytes.is_empty() {
            return Err(Reason::Path("is empty"));
        }
        let mut path = Self::default();
        for name in bytes.split(|&byte| byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => return Err(Reason::Parent),
                name => path = path.join(name)?,
            }
        }
        if path.components().count() > DEEPEST {
            return Err(Reason::Path("is too deep"));
        }
        Ok(path)
    }

    /// Returns the path of a child.
    ///
    /// # Errors
    /// The name is invalid, or the path is too long.
    pub(super) fn join(&self, name: &[u8]) -> Result<Self, Reason> {
        if name.is_empty() || name.contains(&b'/') || name == b"." || name == b".." {
            return Err(Reason::Path("has an invalid name"));
        }
        // A name with a line break could add a line to the script that sets owners.
        if name.iter().any(u8::is_ascii_control) {
            return Err(Reason::Path("contains a control character"));
        }
        if name.len() > LONGEST_NAME || self.0.len() + 1 + name.len() > LONGEST_PATH {
            return Err(Reason::Path("is too long"));
        }
        let mut path = self.clone();
        if !path.0.is_empty() {
            path.0.push(b'/');
        }
        path.0.extend_from_slice(name);
        Ok(path)
    }

    /// Iterates over the names from the root on.
    pub(super) fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|&byte| byte == b'/').filter(|name| !name.is_empty())
    }

    /// Splits it into the parent and the name; the root has none.
    pub(super) fn split_last(&self) -> Option<(Self, &[u8])> {
        if self.is_root() {
            return None;
        }
        match self.0.iter().rposition(|&byte| byte == b'/') {
            Some(slash) => {
                let (parent, name) = self.0.split_at_checked(slash)?;
                Some((Self(parent.to_vec()), name.get(1..)?))
            }
            None => Some((Self::default(), &self.0)),
        }
    }

    /// Returns `true` for the root of the tree.
    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns `true` if `other` is this path or below it.
    pub(super) fn contains(&self, other: &Self) -> bool {
        match other.0.strip_prefix(self.0.as_slice()) {
            Some(rest) => self.is_root() || rest.is_empty() || rest.starts_with(b"/"),
            None => false,
        }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns it as a path relative to a folder of this machine.
    pub(super) fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

impl Ord for TreePath {
    /// Orders a folder directly before everything below it.
    fn cmp(&self, other: &Self) -> Ordering {
        let (mut ours, mut theirs) = (self.0.iter(), other.0.iter());
        loop {
            match (ours.next(), theirs.next()) {
                (Some(a), Some(b)) if a == b => {}
                (Some(b'/'), Some(_)) => return Ordering::Less,
                (Some(_), Some(b'/')) => return Ordering::Greater,
                (a, b) => return a.cmp(&b),
            }
        }
    }
}

impl PartialOrd for TreePath {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Target of a symbolic link that stays in the tree: absolute ones start at its root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target(Vec<u8>);

impl Target {
    /// Parses the target of a link at a path.
    ///
    /// # Errors
    /// It is invalid, or climbs above the root of the tree.
    pub(super) fn parse(at: &TreePath, bytes: &[u8]) -> Result<Self, Reason> {
        if bytes.is_empty() || bytes.len() > LONGEST_PATH || bytes.contains(&0) {
            return Err(Reason::Target);
        }
        let mut depth = if bytes.starts_with(b"/") { 0 } else { at.components().count().saturating_sub(1) };
        for name in bytes.split(|&byte| byte == b'/') {
            depth = match name {
                b"" | b"." => depth,
                b".." => depth.checked_sub(1).ok_or(Reason::LinkLeaves)?,
                _ => depth.saturating_add(1),
            };
        }
        Ok(Self(bytes.to_vec()))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns it as a path, for the creation of the link.
    pub(super) fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> TreePath {
        TreePath::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn paths_are_normalised() {
        assert_eq!(path("./usr//bin/."), path("usr/bin"));
        assert!(path("./").is_root());
        assert_eq!(path("a/b").split_last(), Some((path("a"), b"b".as_slice())));
        assert_eq!(path("a").split_last(), Some((path("."), b"a".as_slice())));
        assert_eq!(path(".").split_last(), None);
    }

    #[test]
    fn paths_that_no_file_can_have() {
        for (text, word) in [
            (String::new(), "empty"),
            ("a\nb".to_owned(), "control"),
            ("n".repeat(256), "too long"),
            (["n"; 129].join("/"), "too deep"),
            ([&"n".repeat(255) as &str; 17].join("/"), "too long"),
        ] {
            let error = TreePath::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn a_folder_comes_directly_before_its_content() {
        let mut paths = ["a-b", "a/z", "a", "a.d", "a/b/c", "b", "a/b"].map(path);
        paths.sort();
        assert_eq!(paths, ["a", "a/b", "a/b/c", "a/z", "a-b", "a.d", "b"].map(path));
        assert!(path("a").contains(&path("a/z")) && path("a").contains(&path("a")));
        assert!(!path("a").contains(&path("a-b")) && path(".").contains(&path("a")));
    }

    #[test]
    fn targets_stay_in_the_tree() {
        let parse = |at, target: &str| Target::parse(&path(at), target.as_bytes());
        for (at, target) in [("lib", "usr/lib"), ("usr/bin/x", "../../etc/x"), ("a", "/etc/alternatives/a"), ("a", ".")]
        {
            assert!(parse(at, target).is_ok(), "{at} -> {target}");
        }
        for (at, target) in [("a", ".."), ("usr/a", "../../x"), ("a", "/../x"), ("usr/a", "b/../../../x")] {
            assert!(matches!(parse(at, target), Err(Reason::LinkLeaves)), "{at} -> {target}");
        }
        assert!(matches!(parse("a", ""), Err(Reason::Target)));
    }
}
