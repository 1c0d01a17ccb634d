/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * Bounce windows of virtio-iommu, versions 2 and 3. The extension uses numbers that the virtio
 * specification leaves free: features 22 and 23, requests 0x40 and 0x41. Feature 24 is not free,
 * and is accepted only for devices of earlier releases.
 */
#ifndef _UAPI_LINUX_VIRTIO_IOMMU_WINDOW_H
#define _UAPI_LINUX_VIRTIO_IOMMU_WINDOW_H

#include <linux/types.h>
#include <linux/virtio_iommu.h>

/*
 * Feature bits for version 3, and for version 2 with windows below and above 4 GiB. A driver
 * accepts one of the offered bits.
 */
#define VIRTIO_IOMMU_F_BOUNCE_WINDOW		22
#define VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2		23
#define VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2_HIGH	24

/* Number of the shared memory region that contains the chunks */
#define VIRTIO_IOMMU_WINDOW_SHMID		0

struct virtio_iommu_window_config {
	struct virtio_iommu_config		standard;
	/* First and last IOVA of the windows, identical in all domains */
	__le64					window_iova_start;
	__le64					window_iova_end;
	/* Chunk size in bytes, a power of two */
	__le64					window_chunk_size;
	/* Maximum number of bytes that the device backs over all domains. Can change. */
	__le64					window_budget;
	/* Maximum size that the device advises to copy, 0 if it does not know. Can change. */
	__le32					bounce_threshold;
	/* The same for memory that endpoints write, 0 if it is bounce_threshold. Can change. */
	__le32					bounce_threshold_write;
};

/* Request types */
#define VIRTIO_IOMMU_T_WINDOW_ADD		0x40
#define VIRTIO_IOMMU_T_WINDOW_DEL		0x41

/* Request to back one chunk and map it at @iova */
struct virtio_iommu_req_window_add {
	struct virtio_iommu_req_head		head;
	__le32					domain;
	__le64					iova;
	/* VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_MAP_F_WRITE */
	__le32					flags;
	__u8					reserved[8];
	/* Written by the device: offset of the chunk in the region, all ones on failure */
	__le64					shm_offset;
	struct virtio_iommu_req_tail		tail;
} __attribute__((packed));

/* Request to unmap the chunk at @iova and give it back */
struct virtio_iommu_req_window_del {
	struct virtio_iommu_req_head		head;
	__le32					domain;
	__le64					iova;
	__u8					reserved[12];
	struct virtio_iommu_req_tail		tail;
} __attribute__((packed));

/* The driver's part of both requests in version 2. The device's part is as in version 3. */
struct virtio_iommu_req_window_v2 {
	struct virtio_iommu_req_head		head;
	__le32					domain;
	/* 0 in the request that gives a chunk back */
	__le32					flags;
	__le64					iova;
	__u8					reserved[8];
} __attribute__((packed));

#endif
