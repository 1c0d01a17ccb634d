/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce windows of virtio-iommu: interface for virtio-iommu.c.
 */
#ifndef _VIRTIO_IOMMU_WINDOW_H
#define _VIRTIO_IOMMU_WINDOW_H

#include <linux/dma-bounce.h>
#include <linux/err.h>
#include <linux/mutex.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>

#include <uapi/linux/virtio_iommu_window.h>

struct dev_pagemap;
struct viommu_dev;
struct viommu_window;

/* Sends a request, waits for the answer, and returns the status as an error number */
typedef int (*viommu_window_send_t)(struct viommu_dev *viommu, void *buf, size_t len);

/**
 * struct viommu_window - windows of one virtio-iommu device
 * @vdev:	the device
 * @send:	sends a request
 * @viommu:	argument of @send
 * @v2:		the device has only version 2 of the extension
 * @ops:	provider that uses these windows
 * @region:	kernel virtual address of the shared memory region
 * @region_addr: CPU physical address of the region
 * @region_len:	length of the region in bytes
 * @pages:	pages of the region, NULL until memory can be lent
 * @iova_start:	first IOVA of the aperture
 * @iova_len:	length of the aperture in bytes
 * @chunk_size:	chunk size in bytes
 * @lock:	protects the members after it. Also held while a chunk is added or removed, because
 *		the device may give the place of a removed chunk to the next chunk.
 * @budget:	maximum number of bytes that the device backs over all domains
 * @threshold:	maximum sizes that the device advises to bounce, as in struct dma_bounce_limits
 * @used:	bitmap of the region's chunks that are in use
 * @nused:	number of chunks in use
 * @config_work: reads the configuration after a change
 */
struct viommu_window {
	struct virtio_device		*vdev;
	viommu_window_send_t		send;
	struct viommu_dev		*viommu;
	bool				v2;
	const struct dma_bounce_ops	*ops;
	void				*region;
	phys_addr_t			region_addr;
	u64				region_len;
	struct dev_pagemap		*pages;
	u64				iova_start;
	u64				iova_len;
	u64				chunk_size;
	struct mutex			lock;	/* protects the members below */
	u64				budget;
	struct dma_bounce_thresholds	threshold;
	unsigned long			*used;
	unsigned long			nused;
	struct work_struct		config_work;
};

/**
 * struct viommu_window_provider - provider of windows as bounce memory
 * @ops:	VIOMMU_WINDOW_OPS. The domains' operations point to this member.
 * @find:	Returns the windows of a domain's device, or NULL if the device has no windows.
 *		Stores the device's number of the domain in @id.
 */
struct viommu_window_provider {
	struct dma_bounce_ops	ops;
	struct viommu_window	*(*find)(struct iommu_domain *domain, u32 *id);
};

#define VIOMMU_WINDOW_OPS {			\
	.name	= "windows",			\
	.limits	= viommu_window_limits,		\
	.add	= viommu_window_add,		\
	.del	= viommu_window_del,		\
	.lend	= viommu_window_lend,		\
	.held	= viommu_window_held,		\
}

/* Returns the number of bytes that the device writes before the tail of a request. */
static inline size_t viommu_window_reply_len(u8 type)
{
	return type == VIRTIO_IOMMU_T_WINDOW_ADD ? sizeof(__le64) : 0;
}

/* Returns true if the windows are above 4 GiB if @high is set, otherwise below (version 2). */
static inline bool viommu_window_iova_fits(bool high, u64 start, u64 last)
{
	return high ? start > U32_MAX : last <= U32_MAX;
}

/* Do not accept version 2. */
static inline void viommu_window_clear_v2(struct virtio_device *vdev)
{
	__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2);
	__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_V2_HIGH);
}

/* Do not accept windows. */
static inline void viommu_window_clear_features(struct virtio_device *vdev)
{
	__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW);
	viommu_window_clear_v2(vdev);
}

#if IS_ENABLED(CONFIG_VIRTIO_IOMMU_WINDOW)

int viommu_window_validate(struct virtio_device *vdev);
struct viommu_window *viommu_window_probe(struct virtio_device *vdev, viommu_window_send_t send,
					  struct viommu_dev *viommu,
					  const struct dma_bounce_ops *ops);
void viommu_window_remove(struct viommu_window *window);
bool viommu_window_config_changed(struct viommu_window *window);
int viommu_window_limits(struct iommu_domain *domain, struct dma_bounce_limits *limits);
void *viommu_window_add(struct iommu_domain *domain, dma_addr_t iova, size_t *size, int prot);
bool viommu_window_del(struct iommu_domain *domain, dma_addr_t iova, void *va, size_t size);
int viommu_window_lend(struct iommu_domain *domain, struct dma_bounce_region *region);
bool viommu_window_held(struct iommu_domain *domain, void *va, size_t size);

#else /* !CONFIG_VIRTIO_IOMMU_WINDOW */

static inline int viommu_window_validate(struct virtio_device *vdev)
{
	viommu_window_clear_features(vdev);
	return 0;
}

static inline struct viommu_window *viommu_window_probe(struct virtio_device *vdev,
							viommu_window_send_t send,
							struct viommu_dev *viommu,
							const struct dma_bounce_ops *ops)
{
	return NULL;
}

static inline void viommu_window_remove(struct viommu_window *window)
{
}

static inline bool viommu_window_config_changed(struct viommu_window *window)
{
	return false;
}

static inline int viommu_window_limits(struct iommu_domain *domain,
				       struct dma_bounce_limits *limits)
{
	return -ENODEV;
}

static inline void *viommu_window_add(struct iommu_domain *domain, dma_addr_t iova, size_t *size,
				      int prot)
{
	return ERR_PTR(-ENODEV);
}

static inline bool viommu_window_del(struct iommu_domain *domain, dma_addr_t iova, void *va,
				     size_t size)
{
	return true;
}

static inline int viommu_window_lend(struct iommu_domain *domain, struct dma_bounce_region *region)
{
	return -ENODEV;
}

static inline bool viommu_window_held(struct iommu_domain *domain, void *va, size_t size)
{
	return false;
}

#endif /* CONFIG_VIRTIO_IOMMU_WINDOW */
#endif /* _VIRTIO_IOMMU_WINDOW_H */
