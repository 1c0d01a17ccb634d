/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Bounce windows of virtio-iommu: what virtio-iommu.c needs of them.
 */
#ifndef _VIRTIO_IOMMU_WINDOW_H
#define _VIRTIO_IOMMU_WINDOW_H

#include <linux/dma-bounce.h>
#include <linux/err.h>
#include <linux/mutex.h>
#include <linux/virtio.h>
#include <linux/workqueue.h>

#include <uapi/linux/virtio_iommu_window.h>

struct dev_pagemap;
struct viommu_dev;
struct viommu_window;

/* Sends a request, waits for the answer, and returns the status as an error number */
typedef int (*viommu_window_send_t)(struct viommu_dev *viommu, void *buf, size_t len);

/**
 * struct viommu_window - the windows of one virtio-iommu device
 * @vdev:	the device
 * @send:	how to send a request
 * @viommu:	what to send it with
 * @ops:	the provider that we are the back of
 * @region:	the shared memory region, mapped
 * @region_addr: where it is for the CPU
 * @region_len:	its bytes
 * @pages:	its pages, once an application may have some of it
 * @iova_start:	first IOVA of the aperture
 * @iova_len:	its bytes
 * @chunk_size:	bytes
 * @lock:	protects the members after it. Held while a chunk comes or goes too: the device
 *		gives the place of the last one that went to the next one that comes.
 * @budget:	bytes that the device backs over all domains
 * @threshold:	size up to which it advises to bounce, or 0
 * @shown:	chunks of the region that are in use
 * @nshown:	how many
 * @config_work: reads the configuration after it changed
 */
struct viommu_window {
	struct virtio_device		*vdev;
	viommu_window_send_t		send;
	struct viommu_dev		*viommu;
	const struct dma_bounce_ops	*ops;
	void				*region;
	phys_addr_t			region_addr;
	u64				region_len;
	struct dev_pagemap		*pages;
	u64				iova_start;
	u64				iova_len;
	u64				chunk_size;
	struct mutex			lock;	/* protects what follows */
	u64				budget;
	u32				threshold;
	unsigned long			*shown;
	unsigned long			nshown;
	struct work_struct		config_work;
};

/**
 * struct viommu_window_provider - windows as bounce memory
 * @ops:	VIOMMU_WINDOW_OPS; what the domains' operations point to
 * @find:	Returns the windows of a domain's device, NULL if it has none, and puts the number
 *		by which the device knows the domain in @id.
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
}

/* Bytes at the end of a request that the device writes, besides what the tail takes */
static inline size_t viommu_window_reply_len(u8 type)
{
	return type == VIRTIO_IOMMU_T_WINDOW_ADD ? sizeof(__le64) : 0;
}

/* Whether windows are on the side of 4 GiB that their feature says */
static inline bool viommu_window_iova_fits(bool high, u64 start, u64 last)
{
	/* Nothing that counts bytes may overflow. */
	return high ? start > U32_MAX && last < S64_MAX : last <= U32_MAX;
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

#else /* !CONFIG_VIRTIO_IOMMU_WINDOW */

static inline int viommu_window_validate(struct virtio_device *vdev)
{
	__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW);
	__virtio_clear_bit(vdev, VIRTIO_IOMMU_F_BOUNCE_WINDOW_HIGH);
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

#endif /* CONFIG_VIRTIO_IOMMU_WINDOW */
#endif /* _VIRTIO_IOMMU_WINDOW_H */
