{{- /* The objects of one daemon: root, role, and site with its defaults. */ -}}
{{- define "protofed.site" -}}
{{- $site := .site }}
{{- $name := printf "%s-site-%s" (include "protofed.fullname" .root) $site.name }}
{{- $image := include "protofed.image" (dict "root" .root "image" .root.Values.clientImage) }}
{{- $pullPolicy := .root.Values.clientImage.pullPolicy }}
{{- $told := dict "root" .root "component" "site" "site" $site.name "state" $site.state "groups" $site.supplementalGroups }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels:
    {{- include "protofed.labels" $told | nindent 4 }}
data:
  settings.toml: |
    {{- $site.settings | nindent 4 }}
  {{- with $site.policy }}
  policy.toml: |
    {{- . | nindent 4 }}
  {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "protofed.labels" $told | nindent 4 }}
spec:
  # For metrics only: nobody calls a site.
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "protofed.selector" $told | nindent 4 }}
  ports:
    - {name: metrics, port: 9464, targetPort: metrics}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "protofed.labels" $told | nindent 4 }}
spec:
  # One daemon speaks for a site: a second one would push it out.
  replicas: 1
  serviceName: {{ $name }}
  selector:
    matchLabels:
      {{- include "protofed.selector" $told | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "protofed.labels" $told | nindent 8 }}
      annotations:
        checksum/settings: {{ list $site.settings $site.policy | toJson | sha256sum }}
    spec:
      {{- include "protofed.podSecurity" $told | nindent 6 }}
      {{- include "protofed.placement" $site | nindent 6 }}
      {{- with $site.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      initContainers:
        {{- dict "image" $image "pullPolicy" $pullPolicy | include "protofed.identityCopy" | nindent 8 }}
      containers:
        - name: client
          image: {{ $image }}
          imagePullPolicy: {{ $pullPolicy }}
          args:
            - client
            - start
            - --settings=/etc/protofed/settings.toml
            - --site={{ $site.name }}
            - --role={{ .role }}
            - --server={{ include "protofed.serverAddress" .root }}
            - --policy=/etc/protofed/policy.toml
            - --identity=/etc/protofed/identity
            - --state=/var/lib/protofed
            - --metrics=0.0.0.0:9464
          {{- with $site.env }}
          env:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            - {name: metrics, containerPort: 9464}
          {{- include "protofed.probes" 60 | nindent 10 }}
          {{- include "protofed.containerSecurity" . | nindent 10 }}
          resources:
            {{- $gpus := ternary (dict "limits" (dict $site.gpuResource ($site.gpus | int))) dict (gt ($site.gpus | int) 0) }}
            {{- mergeOverwrite (deepCopy $site.resources) $gpus | toYaml | nindent 12 }}
          volumeMounts:
            - {name: state, mountPath: /var/lib/protofed}
            - {name: identity, mountPath: /etc/protofed/identity, readOnly: true}
            - {name: settings, mountPath: /etc/protofed/settings.toml, subPath: settings.toml, readOnly: true}
            - {name: policy, mountPath: /etc/protofed/policy.toml, subPath: policy.toml, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            - {name: shm, mountPath: /dev/shm}
            {{- if $site.data }}
            - {name: data, mountPath: /data, readOnly: true}
            {{- end }}
      volumes:
        {{- include "protofed.identityVolumes" $site.identity.secret | nindent 8 }}
        - name: settings
          configMap:
            name: {{ $name }}
        - name: policy
          configMap:
            name: {{ $site.policyConfigMap | default $name }}
        - name: shm
          emptyDir: {medium: Memory, sizeLimit: {{ $site.shm }}}
        {{- with $site.data }}
        - name: data
          {{- if .claim }}
          # Read-only here, too: else the kubelet would give all files to the pod's group.
          persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: true}
          {{- else }}
          hostPath: {path: {{ .hostPath | quote }}}
          {{- end }}
        {{- end }}
  volumeClaimTemplates:
    {{- include "protofed.stateClaim" $told | nindent 4 }}
{{ end }}
