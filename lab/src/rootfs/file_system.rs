//! The file system of a tree, for guests that mount it read-only. No root is needed to build it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::budget::Limits;
use super::header::Meta;
use super::path::TreePath;
use super::refusal::{Reason, Refused};
use super::store::staged_mode;
use super::tree::{Content, Node, Tree};

/// Size of a block of the file system.
const BLOCK: u64 = 4096;
/// Space for the file system itself in MiB, besides a sixteenth of the content.
const SPARE_MIB: u64 = 64;

/// Longest line for `debugfs`, whose buffer for a line has 1024 bytes with some C libraries and 8192 with others.
const LONGEST_COMMAND: usize = 1000;

/// Size of a folder of this machine.
#[derive(Debug, Default)]
struct Size {
    bytes: u64,
    files: u64,
}

/// Creates the file system from a folder.
///
/// # Errors
/// The folder is too large, contains another file system, or cannot be read.
pub(super) fn create(root: &Path, disk: &Path, limits: Limits) -> Result<()> {
    let device = fs::symlink_metadata(root).with_context(|| format!("cannot read {}", root.display()))?.dev();
    let size = measure(root, device, limits)?;
    let spare = size.bytes / 16 + size.files * 256 + (SPARE_MIB << 20);
    let mut command = Command::new(tool("mke2fs"));
    command.args(["-q", "-t", "ext4", "-b", "4096", "-O", "^has_journal", "-m", "0", "-E", "root_owner=0:0", "-N"]);
    command.arg((size.files + 1024).to_string()).arg("-d").arg(root).arg(disk);
    command.arg(format!("{}K", (size.bytes + spare) / 1024));
    run(&mut command, Stdio::null())
}

/// Returns the size of all files, and refuses a folder in which another file system is mounted.
fn measure(root: &Path, device: u64, limits: Limits) -> Result<Size> {
    let (mut size, mut folders, mut seen) = (Size::default(), vec![root.to_owned()], BTreeSet::new());
    while let Some(folder) = folders.pop() {
        size.add(BLOCK);
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry.with_context(|| format!("cannot read {}", folder.display()))?.path();
            let data = fs::symlink_metadata(&path).with_context(|| format!("cannot read {}", path.display()))?;
            if data.dev() != device {
                bail!("another file system is mounted at {}: unmount it", path.display());
            }
            if !data.is_dir() && (data.nlink() == 1 || seen.insert(data.ino())) {
                size.add(data.len());
            }
            if size.bytes > limits.bytes || size.files > limits.entries {
                bail!(
                    "with {}, the folder has more than {} bytes or {} files",
                    path.display(),
                    limits.bytes,
                    limits.entries
                );
            }
            if data.is_dir() {
                folders.push(path);
            }
        }
    }
    Ok(size)
}

impl Size {
    fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX));
        self.files = self.files.saturating_add(1);
    }
}

/// Sets owners and permissions in the file system to those of the tree.
///
/// # Errors
/// The tool fails.
pub(super) fn set_owners(tree: &Tree, disk: &Path, script: &Path) -> Result<()> {
    let file = File::create_new(script).with_context(|| format!("cannot create {}", script.display()))?;
    let mut out = BufWriter::new(file);
    for (path, node) in tree.iter() {
        let commands = commands(path, node).map_err(|reason| Refused::new(path.as_bytes(), reason))?;
        out.write_all(&commands).with_context(|| format!("cannot write {}", script.display()))?;
    }
    out.flush().with_context(|| format!("cannot write {}", script.display()))?;
    run(Command::new(tool("debugfs")).args(["-w", "-f"]).arg(script).arg(disk), Stdio::null())
}

/// Returns the commands that set the owner and the permissions of a node, if they differ from those that it has.
fn commands(path: &TreePath, node: &Node) -> Result<Vec<u8>, Reason> {
    let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // In a quoted word, two quotes stand for one. Paths contain no control characters.
    let name = path.as_bytes().split(|&byte| byte == b'"').collect::<Vec<_>>().join(b"\"\"".as_slice());
    let Meta { mode, uid, gid, .. } = node.meta;
    let mut values = Vec::new();
    if uid != user || path.is_root() {
        values.push(format!("uid {uid}"));
    }
    if gid != group || path.is_root() {
        values.push(format!("gid {gid}"));
    }
    if let Some(kind) = kind_bits(node)
        && (mode != staged_mode(node) || kind != FILE)
    {
        values.push(format!("mode 0{:o}", kind | u32::from(mode)));
    }
    let mut commands = Vec::new();
    for value in values {
        let line = [b"set_inode_field \"/", name.as_slice(), b"\" ", value.as_bytes(), b"\n"].concat();
        // It takes the rest of a line beyond its buffer for another command, which could write any file.
        if line.len() > LONGEST_COMMAND {
            return Err(Reason::Path("is too long to set its owner or permissions"));
        }
        commands.extend(line);
    }
    Ok(commands)
}

/// Kind of a plain file in its permissions.
const FILE: u32 = 0o100_000;

/// Returns the kind of a node in its permissions, or `None` if it has no permissions.
const fn kind_bits(node: &Node) -> Option<u32> {
    match node.content {
        Content::Folder => Some(0o040_000),
        Content::File(_) => Some(FILE),
        Content::Pipe => Some(0o010_000),
        Content::Symlink(_) => None,
    }
}

/// Returns the path of a tool of e2fsprogs, which a normal user may not have in the search path.
fn tool(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders.map(|folder| folder.join(name)).find(|program| program.exists()).unwrap_or_else(|| name.into())
}

/// Runs a tool. `debugfs` succeeds even if one of its commands fails, but then says so.
fn run(command: &mut Command, input: Stdio) -> Result<()> {
    let name = Path::new(command.get_program()).file_name().map(OsStr::as_bytes).map(String::from_utf8_lossy);
    let name = name.unwrap_or_default().into_owned();
    let output = command.stdin(input).stdout(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {name}: install e2fsprogs"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    let problems: Vec<_> = said.lines().filter(|line| !line.starts_with("debugfs ") && !line.is_empty()).collect();
    if !output.status.success() || (name == "debugfs" && !problems.is_empty()) {
        let end: Vec<_> = problems.iter().rev().take(10).rev().copied().collect();
        bail!("{name} ended with {}: {}", output.status, end.join("\n"));
    }
    Ok(())
}
