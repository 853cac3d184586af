//! Device description for clients: regions and interrupt types.

use pvrdma_pci_function::PciFunction;
use rustix::io::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_IRQ_INFO_AUTOMASKED, VFIO_IRQ_INFO_EVENTFD,
    VFIO_IRQ_INFO_MASKABLE, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_INTX_IRQ_INDEX,
    VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_NUM_IRQS, VFIO_PCI_NUM_REGIONS, VFIO_REGION_INFO_CAP_SPARSE_MMAP,
    VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP, VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
};

use super::request::{REGION_INFO_SIZE, RegionAccess, SHORT_INFO_SIZE};
use crate::mappable::Mappable;

/// `vfio_region_info` with one mappable area: the fixed part, `vfio_region_info_cap_sparse_mmap`, an area.
const SPARSE_INFO_SIZE: u32 = REGION_INFO_SIZE + 16 + 16;

/// Meaning of a region number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Region {
    /// Base address register.
    Bar(usize),
    /// Configuration space.
    Config,
    /// Defined by VFIO and absent here: ROM and VGA.
    Empty,
}

/// Sizes of all parts of the device that a client can see.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    bars: [u64; 6],
    config: u64,
    msix: u16,
    intx: bool,
    mappable: Option<Area>,
}

/// Mappable part of a region.
#[derive(Clone, Copy, Debug)]
struct Area {
    region: u32,
    offset: u64,
    size: u64,
}

impl Shape {
    pub(crate) fn of(function: &dyn PciFunction, intx: bool, mappable: Option<&Mappable>) -> Self {
        Self {
            bars: function.bars().map(|bar| bar.map_or(0, |bar| bar.size)),
            config: function.config_size() as u64,
            msix: function.msix().map_or(0, |msix| msix.vectors),
            intx,
            mappable: mappable.map(|&Mappable { region, offset, size, .. }| Area { region, offset, size }),
        }
    }

    /// Returns the region with number `index`.
    ///
    /// # Errors
    /// The region does not exist.
    pub(crate) fn region(&self, index: u32) -> Result<Region, Errno> {
        match index {
            VFIO_PCI_CONFIG_REGION_INDEX => Ok(Region::Config),
            VFIO_PCI_NUM_REGIONS.. => Err(Errno::INVAL),
            _ => {
                let index = usize::try_from(index).map_err(|_| Errno::INVAL)?;
                Ok(self.bars.get(index).filter(|&&size| size != 0).map_or(Region::Empty, |_| Region::Bar(index)))
            }
        }
    }

    fn region_size(&self, region: Region) -> u64 {
        match region {
            Region::Bar(index) => self.bars.get(index).copied().unwrap_or(0),
            Region::Config => self.config,
            Region::Empty => 0,
        }
    }

    /// Returns the number of bytes of an access inside the region; the rest reads as zero and ignores writes.
    pub(crate) fn inside(&self, region: Region, access: &RegionAccess) -> usize {
        let room = self.region_size(region).saturating_sub(access.offset);
        usize::try_from(room.min(u64::from(access.count))).unwrap_or(0)
    }

    /// Writes `vfio_device_info`.
    pub(crate) fn device_info(&self, out: &mut Vec<u8>) {
        let flags = VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET;
        put(out, &[SHORT_INFO_SIZE, flags, VFIO_PCI_NUM_REGIONS, VFIO_PCI_NUM_IRQS]);
    }

    /// Writes `vfio_region_info` for a client that has space for `room` bytes of it. Returns `true` if the reply
    /// carries the file to be mapped.
    ///
    /// # Errors
    /// The region does not exist.
    pub(crate) fn region_info(&self, index: u32, room: u32, out: &mut Vec<u8>) -> Result<bool, Errno> {
        let region = self.region(index)?;
        let access = VFIO_REGION_INFO_FLAG_READ | VFIO_REGION_INFO_FLAG_WRITE;
        let flags = match region {
            Region::Bar(_) => access,
            // QEMU posts writes to memory BARs, and the driver then reads memory that the device has not filled yet.
            // QEMU stops posting for the whole device when any region is mappable. Neither QEMU nor Cloud Hypervisor
            // ever maps this region, so the flag costs nothing.
            Region::Config => access | VFIO_REGION_INFO_FLAG_MMAP,
            Region::Empty => 0,
        };
        let area = self.mappable.filter(|area| area.region == index);
        // A client that lacks space repeats the request with `argsz` bytes. QEMU refuses a reply beyond its space.
        let whole = room >= SPARSE_INFO_SIZE;
        // argsz, flags, index, cap_offset, size, offset
        let head = match area {
            None => [REGION_INFO_SIZE, flags, index, 0],
            Some(_) => {
                let flags = flags | VFIO_REGION_INFO_FLAG_MMAP | VFIO_REGION_INFO_FLAG_CAPS;
                // QEMU needs the capability offset even if the capabilities themselves do not fit.
                [SPARSE_INFO_SIZE, flags, index, REGION_INFO_SIZE]
            }
        };
        put(out, &head);
        out.extend(self.region_size(region).to_le_bytes());
        out.extend(0u64.to_le_bytes());
        if let Some(Area { offset, size, .. }) = area.filter(|_| whole) {
            // Version 1 of the capability, without a next one; one area.
            put(out, &[VFIO_REGION_INFO_CAP_SPARSE_MMAP | 1 << 16, 0, 1, 0]);
            out.extend(offset.to_le_bytes());
            out.extend(size.to_le_bytes());
        }
        Ok(area.is_some())
    }

    /// Returns the number of interrupts of a type.
    ///
    /// # Errors
    /// The type does not exist.
    pub(crate) fn irq_count(&self, index: u32) -> Result<u32, Errno> {
        match index {
            VFIO_PCI_INTX_IRQ_INDEX => Ok(u32::from(self.intx)),
            VFIO_PCI_MSIX_IRQ_INDEX => Ok(u32::from(self.msix)),
            // Never signalled, but QEMU warns when it is missing.
            VFIO_PCI_ERR_IRQ_INDEX => Ok(1),
            VFIO_PCI_NUM_IRQS.. => Err(Errno::INVAL),
            _ => Ok(0),
        }
    }

    /// Writes `vfio_irq_info`.
    ///
    /// # Errors
    /// The type does not exist.
    pub(crate) fn irq_info(&self, index: u32, out: &mut Vec<u8>) -> Result<(), Errno> {
        let count = self.irq_count(index)?;
        let flags = match (index, count) {
            (_, 0) => 0,
            (VFIO_PCI_INTX_IRQ_INDEX, _) => VFIO_IRQ_INFO_EVENTFD | VFIO_IRQ_INFO_MASKABLE | VFIO_IRQ_INFO_AUTOMASKED,
            // Without NORESIZE the client may add vectors one at a time.
            _ => VFIO_IRQ_INFO_EVENTFD,
        };
        put(out, &[SHORT_INFO_SIZE, flags, index, count]);
        Ok(())
    }
}

fn put(out: &mut Vec<u8>, words: &[u32]) {
    out.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        let mappable = Some(Area { region: 2, offset: 0x1000, size: 0xf_f000 });
        Shape { bars: [0x4000, 0x1000, 0x10_0000, 0, 0, 0], config: 256, msix: 3, intx: false, mappable }
    }

    #[test]
    fn the_config_region_claims_to_be_mappable() {
        let mut out = Vec::new();
        assert!(!shape().region_info(7, 32, &mut out).unwrap());
        assert_eq!(out[..16], [32, 0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(out[16..], [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Conformance 2: BAR 2 keeps its size, and all of it but the first page is mappable. QEMU asks with 32 bytes
    /// first, then with the size from the reply; Cloud Hypervisor likewise. Neither accepts a longer reply.
    #[test]
    fn the_mappable_part_is_reported_where_the_reply_has_room() {
        let info = |index, room| {
            let mut out = Vec::new();
            let file = shape().region_info(index, room, &mut out).unwrap();
            (file, out)
        };
        for room in [32, 33, 48, 63] {
            let (file, out) = info(2, room);
            assert!(file && out.len() == 32, "{room}");
            // The flags say mappable (4) and capabilities (8), although the latter do not fit.
            assert_eq!(out[..16], [64, 0, 0, 0, 15, 0, 0, 0, 2, 0, 0, 0, 32, 0, 0, 0], "{room}");
        }
        for room in [64, 65, 4096, u32::MAX] {
            let (file, out) = info(2, room);
            assert!(file && out.len() == 64, "{room}");
            assert_eq!(out[..16], [64, 0, 0, 0, 15, 0, 0, 0, 2, 0, 0, 0, 32, 0, 0, 0], "{room}");
            assert_eq!(out[32..48], [1, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "{room}");
            assert_eq!(out[48..56], 0x1000_u64.to_le_bytes(), "{room}");
            assert_eq!(out[56..], 0xf_f000_u64.to_le_bytes(), "{room}");
        }
        for other in [0, 1, 3, 7, 8] {
            let (file, out) = info(other, u32::MAX);
            assert!(!file && out.len() == 32 && out[12..16] == [0; 4], "{other}");
        }
        assert_eq!(shape().region_info(9, 64, &mut Vec::new()), Err(Errno::INVAL));
    }

    #[test]
    fn accesses_are_clipped() {
        let shape = shape();
        let inside = |offset, count| shape.inside(Region::Bar(1), &RegionAccess { offset, region: 1, count });
        assert_eq!(inside(0, 4), 4);
        assert_eq!(inside(0xffe, 4), 2);
        assert_eq!(inside(0x1000, 4), 0);
        assert_eq!(inside(u64::MAX, u32::MAX), 0);
        assert_eq!(shape.region(3), Ok(Region::Empty));
        assert_eq!(shape.region(8), Ok(Region::Empty));
        assert_eq!(shape.region(9), Err(Errno::INVAL));
    }

    #[test]
    fn interrupt_types() {
        let counts: Vec<_> = (0..5).map(|index| shape().irq_count(index).unwrap()).collect();
        assert_eq!(counts, [0, 0, 3, 1, 0]);
        assert_eq!(shape().irq_count(5), Err(Errno::INVAL));
        let mut out = Vec::new();
        shape().irq_info(2, &mut out).unwrap();
        assert_eq!(out, [16, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    }
}
