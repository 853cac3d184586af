//! The ICRC of complete frames with each bit flipped: A from Linux's rxe, B from a ConnectX-4 Lx, C computed for RoCE
//! v1.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

use pvrdma_roce::wire::{CrcError, Packet, build};

const VECTORS: [(&str, &str); 15] = [
    (
        "A1",
        "525400007712525400007711080045000030b5ea40004011696ac0a84d0bc0a84d0cdd6512b7001c00001100ffff0000\
         022c00b435131f00000163a44f60",
    ),
    (
        "A2",
        "525400007711525400007712080045000030b8734000401166e1c0a84d0cc0a84d0bdd6512b7001c00000430ffff0000\
         002b80b435140300000002f271c7",
    ),
    (
        "A3",
        "525400007711525400007712080045000044b87a4000401166c6c0a84d0cc0a84d0bdd6512b7003000000a30ffff0000\
         002b80b4351b000000001ece700000001eac00000005030a11181f00000080107391",
    ),
    (
        "A4",
        "525400007711525400007712080045000048b8854000401166b7c0a84d0cc0a84d0bdd6512b7003400001300ffff0000\
         002b80b4352a000000001ecee00000001eac1122334455667788010203040506071827dba7cf",
    ),
    (
        "A5",
        "525400007712525400007711080045000038b5fd40004011694fc0a84d0bc0a84d0cdd6512b7002400001200ffff0000\
         022c00b435291f00000e0102030405060708e023346a",
    ),
    (
        "A6",
        "525400007711525400007712080045000040d5764000401149cec0a84d0cc0a84d0bcfe712b7002c00006530ffff0000\
         003d00345679111111110000023e0df0ad0b030a11181f000000a2d55602",
    ),
    (
        "A7",
        "5254000077125254000077118100602a0800456a00308bf44000401190f6c0a84e0bc0a84e0ccac812b7001c00001100\
         ffff00000223008e0e571f000001fc0b31a5",
    ),
    (
        "A8",
        "52540000771252540000771186dd60000000001c1140fe80000000000000505400fffe007711fe800000000000005054\
         00fffe007712e54412b7001c00001100ffff00000212005565b21f0000015dc5778e",
    ),
    (
        "A9",
        "52540000771152540000771286dd6b80000000281140fd000077000000000000000000000012fd000077000000000000\
         000000000011e34112b7002800000c00ffff00000042805af712000000003d9770000000350300000000d96f3540",
    ),
    (
        "A10",
        "52540000771152540000771286dd66a0000000201140fd000077000000000000000000000012fd000077000000000000\
         000000000011e29412b7002000006400ffff00000043003456781111111100000244c70a8fba",
    ),
    (
        "A11",
        "525400007711525400007712080045000034401740004011df39c0a84d0cc0a84d0bc12312b7002000000440ffffff00\
         00baff00100000010203040506077a08c11a",
    ),
    (
        "B1",
        "e41d2dab2bc27cfe90643b32080045c2003c718c4000401191610a0011010a001201000012b7002800008100ffff4000\
         0118000000000000000000000000000000000000000082fd002a",
    ),
    (
        "C1",
        "52540000771252540000771189156000000000141b4000000000000000000000ffffc0a84d0b00000000000000000000\
         ffffc0a84d0c1100ffff0000022c00b435131f000001316305c5",
    ),
    (
        "C2",
        "525400007711525400007712891566a1234500281b01fe80000000000000505400fffe007712fe800000000000005054\
         00fffe0077110a30ffff0000002b80b4351b000000001ece700000001eac00000005030a11181f00000091ca35ec",
    ),
    (
        "C3",
        "5254000077115254000077128100602a89156000000000241b40fe80000000000000505400fffe007712fe8000000000\
         0000505400fffe0077116530ffff0000003d00345679111111110000023e0df0ad0b030a11181f0000007a3dfd02",
    ),
];

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn every_vector_verifies_and_is_rebuilt() {
    for (name, hex) in VECTORS {
        let frame = bytes(hex);
        let packet = Packet::parse(&frame).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(packet.computed_icrc(), packet.icrc, "{name}");
        assert_eq!(packet.verify(), Ok(()), "{name}");
        assert_eq!(build(&packet.header, packet.payload).unwrap(), frame, "{name}");
    }
}

/// A flipped bit that the ICRC covers is detected; others are ignored, and nothing panics.
#[test]
fn each_flipped_bit_is_noticed_or_invisible() {
    for (name, hex) in VECTORS {
        let original = bytes(hex);
        let whole = Packet::parse(&original).unwrap();
        let mut unnoticed = 0;
        for bit in 0..original.len() * 8 {
            let mut frame = original.clone();
            frame[bit / 8] ^= 1 << (bit % 8);
            match Packet::parse(&frame).map(|packet| (packet.verify(), packet)) {
                Err(_) | Ok((Err(CrcError::Icrc | CrcError::UdpChecksum), _)) => {}
                Ok((Ok(()), packet)) => {
                    unnoticed += 1;
                    assert_eq!(packet.payload, whole.payload, "{name} bit {bit}");
                    assert_eq!(packet.header.extension, whole.header.extension, "{name} bit {bit}");
                    assert_eq!(packet.header.bth.psn, whole.header.bth.psn, "{name} bit {bit}");
                }
            }
        }
        // Addresses and tag of the link, the masked parts of the network header, and the masked byte of the BTH.
        assert!(unnoticed >= 96, "{name}: {unnoticed}");
    }
}
