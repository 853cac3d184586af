//! Effect of a modify request on the path of a connection.

use pvrdma_roce::Path;
use pvrdma_verbs_types::QpAttrMask;

use crate::gid::BoundGid;

/// Effect of a modify request on the path of a connection that is on the wire.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewPath {
    /// The address has not changed.
    Same,
    /// There is a path to the address, from this GID.
    To(Path, BoundGid),
    /// There is no path any more: a device of this process owns the address, or the source GID is not bound. No packet
    /// may be sent, in particular not to the old address.
    Gone,
}

impl NewPath {
    /// Combines the path that was found with the attributes that the request changed.
    pub(crate) fn of(found: Option<(Path, BoundGid)>, mask: QpAttrMask) -> Self {
        match found {
            Some((path, source)) => Self::To(path, source),
            None if mask.contains(QpAttrMask::AV) => Self::Gone,
            None => Self::Same,
        }
    }

    /// Updates a path and its source.
    pub(super) fn replace(self, path: &mut Path, source: &mut Option<BoundGid>) {
        match self {
            Self::Same => {}
            Self::To(new, from) => (*path, *source) = (new, Some(from)),
            Self::Gone => *source = None,
        }
    }
}
