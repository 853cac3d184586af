//! What a modify request does to the path of a connection.

use pvrdma_roce::Path;
use pvrdma_verbs::QpAttrMask;

use crate::gid::BoundGid;

/// What a modify request means for the path of a connection that is on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewPath {
    /// The address is the old one.
    Same,
    /// There is a path to the address, from this GID.
    To(Path, BoundGid),
    /// There is none, because a device of this process has the address or its source is not bound: nothing may leave
    /// any more, least of all to the old one.
    Gone,
}

impl NewPath {
    /// The path that was found after a request that changed these attributes.
    pub(crate) fn of(found: Option<(Path, BoundGid)>, mask: QpAttrMask) -> Self {
        match found {
            Some((path, source)) => Self::To(path, source),
            None if mask.contains(QpAttrMask::AV) => Self::Gone,
            None => Self::Same,
        }
    }

    /// Takes the place of a path and its source.
    pub(super) fn replace(self, path: &mut Path, source: &mut Option<BoundGid>) {
        match self {
            Self::Same => {}
            Self::To(new, from) => (*path, *source) = (new, Some(from)),
            Self::Gone => *source = None,
        }
    }
}
